"""What is counted: the debtor's own time, in steps that only decode, for each block that lies elsewhere."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from services.worker.engine.paged import Shape
from services.worker.engine.partition import Part
from services.worker.engine.remote import MeteredRemote, Partial
from services.worker.engine.spans import PackedSpans

SHAPE = Shape(scaling=1.0)
NOTHING = torch.zeros(0)


class Slow:
    """Each call takes 1 s, and there are two partial results for each layer."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.calls: list[str] = []

    def _work(self, call: str) -> None:
        self.now_s += 1.0
        self.calls.append(call)

    def begin(self, parts: Sequence[Part]) -> None:
        self._work("begin")

    def send(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, shape: Shape
    ) -> None:
        self._work("send")

    def collect(self, layer: int) -> Iterator[Partial]:
        for _ in range(2):
            self._work("collect")
            yield NOTHING, NOTHING, NOTHING

    def end(self) -> None:
        self._work("end")

    def abandon(self) -> None:
        self._work("abandon")


def part(rows: int, blocks: int, sequences: int) -> Part:
    spans = PackedSpans(
        first_row=np.linspace(0, rows, sequences + 1).astype(np.int32),
        first_position=np.zeros(sequences, dtype=np.int32),
        table_start=np.arange(sequences, dtype=np.int32),
        table_position=np.zeros(sequences, dtype=np.int32),
        key_end=np.zeros(sequences, dtype=np.int32),
        blocks=np.arange(blocks, dtype=np.int32),
        slots=np.zeros(rows, dtype=np.int64),
    )
    return Part(1, np.arange(rows), spans)


def step(meter: MeteredRemote, slow: Slow, parts: Sequence[Part]) -> None:
    meter.begin(parts)
    meter.send(0, NOTHING, NOTHING, NOTHING, SHAPE)
    for _ in meter.collect(0):
        slow.now_s += 100.0  # the caller's own work
    meter.end()


def test_a_decode_steps_extra_time_is_divided_by_its_blocks_elsewhere() -> None:
    slow = Slow()
    meter = MeteredRemote(slow, clock=lambda: slow.now_s)
    assert meter.block_s == 0.0
    step(meter, slow, [part(2, 3, 2), part(1, 7, 1)])
    assert meter.block_s == pytest.approx(5.0 / 10)
    step(meter, slow, [part(1, 5, 1)])
    assert meter.block_s == pytest.approx(0.5 + 0.1 * (1.0 - 0.5))
    assert slow.calls == ["begin", "send", "collect", "collect", "end"] * 2


def test_a_step_with_a_prompt_says_nothing() -> None:
    slow = Slow()
    meter = MeteredRemote(slow, clock=lambda: slow.now_s)
    step(meter, slow, [part(16, 3, 1)])
    assert meter.block_s == 0.0
