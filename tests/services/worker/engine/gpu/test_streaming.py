"""What a step brings in is there when each layer attends, whether its copies are submitted on the way or
stand in a graph, and whichever the step before was."""

from random import Random
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (make setup-gpu)")

from services.worker.engine.gpu import lanes as gpu_lanes
from services.worker.engine.gpu import streaming as gpu_streaming
from services.worker.engine.gpu.lanes import GpuLanes
from services.worker.engine.gpu.spans import TABLE_END
from services.worker.engine.gpu.streaming import GpuStream, open_on_gpu
from services.worker.engine.stream import NO_FIGURES
from services.worker.kv.tiers.resident import ResidentKv
from tests.services.worker.engine.gpu.test_lanes import Device

DEVICE_BLOCKS, IDS, SPARE, HEAD = 12, 20, 4, (2, 3, 4)


class Rig:
    """Blocks of which each layer's part has its own number in it, some of them outside."""

    def __init__(self, device: torch.device, layers: int, monkeypatch: pytest.MonkeyPatch, *, is_early: bool):
        self.layers, self.device = layers, device
        size = (layers * DEVICE_BLOCKS, *HEAD)
        open_stream = open_on_gpu
        if device.type == "cpu":
            cuda = Device(is_early=is_early)
            for module in (gpu_lanes, gpu_streaming):
                monkeypatch.setattr(module, "launch", cuda.launch)

            def open_stream(keys: Any, values: Any, rows: Any, layers: int) -> GpuStream:
                lanes = GpuLanes(keys, values, rows, layers, cuda=cuda)
                return GpuStream(lanes, layers, len(keys) // layers)

        self.kv = ResidentKv(
            open_stream,
            torch.zeros(*size, device=device),
            torch.zeros(*size, device=device),
            layers,
            IDS,
            rows=IDS,
            timeout_s=5.0,
        )
        assert isinstance(self.kv.stream, GpuStream)
        self.stream = self.kv.stream
        assert self.kv.set_buffers(SPARE)
        self.kv.residency.take(list(range(IDS - SPARE)))
        self.pointed = torch.zeros(64 + len(TABLE_END), dtype=torch.int32, device=device)

    def fill(self) -> None:
        """Each block's part of each layer has the number of both."""
        for block in range(IDS - SPARE):
            parts = [
                np.full(2 * np.prod(HEAD), 100 * block + layer, np.float32) for layer in range(self.layers)
            ]
            self.kv.records().write([np.concatenate(parts).view(np.uint8)], [block])

    def step(self, blocks: list[int], *, is_replayed: bool) -> None:
        wanted = np.array(blocks, np.int32)
        tables = self.kv.locate(wanted, wanted[:0])
        self.kv.point(tables)
        raw = torch.from_numpy(np.concatenate([tables, TABLE_END])).to(self.device)
        if not is_replayed:
            self._layers(self.kv, blocks, self.kv.tables)
        else:
            self.stream.replay(lambda: self._as_a_graph(raw, blocks))
        self.kv.end(is_complete=True)
        self.kv.residency.check_integrity()

    def _as_a_graph(self, raw: torch.Tensor, blocks: list[int]) -> None:
        gate = self.stream.fetches.gate(raw, self.pointed)
        with gate:
            self._layers(gate, blocks, lambda: self.pointed)

    def _layers(self, gate: Any, blocks: list[int], tables: Any) -> None:
        for layer in range(self.layers):
            gate.enter(layer)
            found = tables()
            if found is not None:
                arena, first = self.kv.arena, layer * DEVICE_BLOCKS
                for block, place in zip(blocks, found.tolist(), strict=False):
                    for pool in arena:
                        part = pool[first + place]
                        assert (part == 100 * block + layer).all(), (layer, block, place, part.flatten()[0])
            gate.leave(layer)


@pytest.mark.parametrize("layers", [5, 6])
@pytest.mark.parametrize("is_early", [True, False])
def test_each_layer_finds_its_blocks(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, layers: int, is_early: bool
) -> None:
    rig = Rig(device, layers, monkeypatch, is_early=is_early)
    rig.fill()
    dice = Random(layers)
    blocks, replays = dice.sample(range(IDS - SPARE), 10), 0
    for _ in range(40):
        if dice.random() < 0.4:  # Else what the last step brought in is kept.
            blocks = dice.sample(range(IDS - SPARE), dice.randint(4, 12))
        is_replayed = dice.random() < 0.6
        replays += is_replayed
        rig.step(blocks, is_replayed=is_replayed)
    figures = rig.kv.figures()
    assert 0 < rig.stream.fetches.add_to(NO_FIGURES).fetched < figures.fetched
    rig.kv.close()
