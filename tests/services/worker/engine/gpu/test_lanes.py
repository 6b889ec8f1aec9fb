"""Copies by a CUDA device's streams, on the way or in a graph: what a step brings in is there in time.

On a CPU the streams are those of a device that does everything as late, or as early, as it may."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (make setup-gpu)")

from services.worker.core.settings import PieSettings
from services.worker.engine import attention, engine
from services.worker.engine.engine import TorchEngine
from services.worker.engine.gpu import decoder
from services.worker.engine.gpu import lanes as gpu_lanes
from services.worker.engine.gpu import streaming as gpu_streaming
from services.worker.engine.gpu.attention import launch
from services.worker.engine.gpu.backend import TritonBackend
from services.worker.engine.gpu.lanes import GpuLanes
from services.worker.engine.gpu.spans import TABLE_END
from services.worker.engine.gpu.streaming import GpuStream, open_on_gpu
from services.worker.engine.loading import describe
from services.worker.engine.stream import NO_FIGURES
from services.worker.kv.tiers.resident import BlockStream, ResidentKv
from services.worker.pie.blocks import BlockPie
from tests.services.worker.engine.gpu.test_graphs import recording
from tests.services.worker.engine.rig import BLOCK_TOKENS, GREEDY, Sequences
from tests.services.worker.pie.conftest import llama  # noqa: F401  the model of six layers


@dataclass
class Queue:
    """A stream: what was given to it and is not done yet."""

    device: "Device"
    work: list[Callable[[], None]] = field(default_factory=list)

    def wait_event(self, event: "Mark") -> None:
        if self is self.device.computation:
            event.synchronize()
        else:
            self.work.append(event.synchronize)
            self.device.made_progress(self)

    def synchronize(self) -> None:
        while self.work:
            self.work.pop(0)()


@dataclass
class Mark:
    device: "Device"
    stream: Queue | None = None
    at: int = 0

    def record(self, stream: Queue) -> None:
        assert self.stream is None, "an event is recorded once"
        self.stream = stream
        if stream is self.device.computation:
            self.reach()
        else:
            stream.work.append(self.reach)
            self.device.made_progress(stream)

    def reach(self) -> None:
        self.device.now += 1
        self.at = self.device.now

    def query(self) -> bool:
        return self.at > 0

    def synchronize(self) -> None:
        assert self.stream is not None, "waited for before it was recorded"
        while not self.at:
            self.stream.work.pop(0)()

    def elapsed_time(self, later: "Mark") -> float:
        assert self.at and later.at
        return 1e-3 * (later.at - self.at)


class Device:
    """In place of `torch.cuda`. The computation is done as it is submitted; copies are `early`, or late: when
    somebody waits for them."""

    def __init__(self, *, is_early: bool) -> None:
        self.is_early = is_early
        self.computation = self.current = Queue(self)
        self.now = self.copies = 0
        self._launch = launch

    def Stream(self, device: torch.device) -> Queue:
        return Queue(self)

    def Event(self, enable_timing: bool = False) -> Mark:
        return Mark(self)

    def current_stream(self, device: torch.device) -> Queue:
        return self.current

    @contextmanager
    def stream(self, stream: Queue) -> Iterator[None]:
        self.current = stream
        yield
        self.current = self.computation

    def made_progress(self, stream: Queue) -> None:
        if self.is_early:
            stream.synchronize()

    def launch(self, *given: Any, **constants: Any) -> None:
        """Kernels that copy go to the stream that is current."""
        self.copies += 1
        self.current.work.append(lambda: self._launch(*given, **constants))
        if self.current is self.computation:
            self.current.synchronize()
        self.made_progress(self.current)


def lanes_on(
    device: torch.device, keys: torch.Tensor, values: torch.Tensor, rows: npt.NDArray[np.uint8], layers: int
) -> GpuLanes:
    """The real ones where there is a device."""
    if device.type == "cuda":
        stream: Any = open_on_gpu(keys, values, rows, layers)
        found: GpuLanes = stream._lanes
        return found
    return GpuLanes(keys, values, rows, layers, cuda=Device(is_early=True))


@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 5), (torch.float32, 96), (torch.bfloat16, 1)])
def test_parts_are_copied_both_ways(device: torch.device, dtype: torch.dtype, dim: int) -> None:
    layers, blocks, count = 3, 7, 4
    keys = torch.randn(layers * blocks, 2, dim, 3, device=device).to(dtype)
    values = torch.randn(layers * blocks, 2, 3, dim, device=device).to(dtype)
    rows = np.zeros((count, layers * (keys[0].nbytes + values[0].nbytes)), dtype=np.uint8)
    lanes = lanes_on(device, keys, values, rows, layers)
    places = np.array([20, 0, 5, 13], dtype=np.int32)
    parts = np.array([11, 1, 0, 7], dtype=np.int32)
    lanes.copy_now(parts, places, is_in=False)
    records = rows.reshape(count * layers, -1)
    for part, place in zip(parts, places, strict=True):
        expected = [pool[place].flatten().view(torch.uint8).cpu().numpy() for pool in (keys, values)]
        assert bytes(records[part]) == b"".join(map(bytes, expected))
    assert not records[[at for at in range(12) if at not in parts]].any()
    before = keys.clone(), values.clone()
    keys.zero_()
    values.zero_()
    uploaded = lanes.upload(parts), lanes.upload(places)
    assert lanes.settle(lanes.bring(*uploaded))
    for pool, kept in zip((keys, values), before, strict=True):
        assert torch.equal(pool[places], kept[places])
        assert not pool[[at for at in range(21) if at not in places]].any()
    lanes.close()


def on_the_cpu(monkeypatch: pytest.MonkeyPatch, cuda: Device) -> None:
    """A GPU's engine in host memory: its backend, its Llama with recorded decodes, its copies."""

    def open_stream(
        keys: torch.Tensor, values: torch.Tensor, rows: npt.NDArray[np.uint8], layers: int
    ) -> BlockStream:
        return GpuStream(GpuLanes(keys, values, rows, layers, cuda=cuda), layers, len(keys) // layers)

    def make_triton(pools: Any, block_tokens: int, device: torch.device) -> TritonBackend:
        return TritonBackend(pools, block_tokens, device)

    for module in (gpu_lanes, gpu_streaming):
        monkeypatch.setattr(module, "launch", cuda.launch)
    monkeypatch.setattr(engine, "stream_opener", lambda library, device: open_stream)
    monkeypatch.setattr(attention, "_make_triton", make_triton)
    monkeypatch.setattr("services.worker.engine.native.library.choose", lambda *_, **__: None)
    monkeypatch.setattr(decoder, "CudaCapture", lambda: recording)
    with_graphs: Any = decoder.with_graphs
    monkeypatch.setitem(with_graphs.__kwdefaults__, "max_batch", 2)


def answers(model: Any, kv_blocks: int, fifo_layers: int, where: torch.device) -> tuple[list[list[int]], Any]:
    """Of two prompts: chunks, decodes, a preemption. The engine comes with them."""
    pie = PieSettings(enabled=bool(fifo_layers), expansion="fixed", fifo_layers=fifo_layers)
    made = TorchEngine(
        describe(model.to(where)), kv_blocks=kv_blocks, block_tokens=BLOCK_TOKENS, pie=pie, attention="auto"
    )
    sequences = Sequences(made, made.make_pool(), [[4, 3] * 9, [5, 6, 7] * 4], GREEDY)
    for step in range(7):
        if step == 5:
            sequences.preempt(1)
        sequences.step([0, 1], most_tokens=10)
        if isinstance(made.pie, BlockPie):
            made.pie.kv.residency.check_integrity()
    return [sequences.answer(index, 4) for index in range(2)], made


@pytest.mark.parametrize("is_early", [True, False])
def test_the_text_is_the_same_where_blocks_come_by_streams(
    llama: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    is_early: bool,
) -> None:
    cuda = Device(is_early=is_early)
    expected, _ = answers(llama, 32, 0, torch.device("cpu"))
    if device.type == "cpu":
        on_the_cpu(monkeypatch, cuda)
    found, made = answers(llama, 10, 4, device)
    llama.to("cpu")
    assert found == expected
    assert made.attention.triton is not None
    figures = made.pie.kv.figures()
    assert figures.fetched > 0 and figures.layers > 0 and figures.stall_s >= 0
    assert made.pie.kv.stream.fetches.add_to(NO_FIGURES).fetched > 0, (
        "no step that brought in blocks was replayed"
    )
    assert figures.early > 0 if is_early and device.type == "cpu" else figures.early >= 0
    made.pie.close()


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

        keys, values = torch.zeros(2, *size, device=device)
        self.kv = ResidentKv(open_stream, keys, values, layers, IDS, rows=IDS, timeout_s=5.0)
        assert isinstance(self.kv.stream, GpuStream)
        self.stream = self.kv.stream
        assert self.kv.set_buffers(SPARE)
        self.kv.residency.take(list(range(IDS - SPARE)))
        self.pointed = torch.zeros(64 + len(TABLE_END), dtype=torch.int32, device=device)

    def fill(self) -> None:
        """Each block's part of each layer has the number of both."""
        for block in range(IDS - SPARE):
            parts = np.repeat(np.arange(self.layers, dtype=np.float32) + 100 * block, 2 * np.prod(HEAD))
            self.kv.records().write([parts.view(np.uint8)], [block])

    def step(self, blocks: list[int], *, is_replayed: bool) -> None:
        wanted = np.array(blocks, np.int32)
        tables = self.kv.locate(wanted, wanted[:0])
        self.kv.point(tables)
        raw = torch.from_numpy(np.concatenate([tables, TABLE_END])).to(self.device)
        if is_replayed:
            gate = self.stream.fetches.gate(raw, self.pointed)
            self.stream.replay(lambda: self._as_a_graph(gate, blocks))
        else:
            self._layers(self.kv, blocks, self.kv.tables)
        self.kv.end(is_complete=True)
        self.kv.residency.check_integrity()

    def _as_a_graph(self, gate: Any, blocks: list[int]) -> None:
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
