"""Attention over keys at creditors: merged parts are exact in any order, and the waiting time is measured."""

from collections.abc import Iterator, Sequence

import pytest
import torch

from services.worker.engine import paged
from services.worker.engine.attention import LayerShape, PagedAttention
from services.worker.engine.native import library as native
from services.worker.engine.partition import Homes
from services.worker.engine.remote import Partial, merge_into
from services.worker.engine.spans import Span
from tests.rounding import assert_within, merge_bounds

ROWS, HEADS, DIM = 5, 3, 20
NOTHING = torch.zeros(0, 1, 4)


def parts(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs and log-sum-exps; some parts saw no key."""
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(count, ROWS, HEADS, DIM, generator=generator)
    lses = torch.randn(count, ROWS, HEADS, generator=generator) * 20
    unseen = torch.rand(count, ROWS, HEADS, generator=generator) < 0.3
    return outputs.masked_fill(unseen.unsqueeze(-1), 0.0), lses.masked_fill(unseen, float("-inf"))


def by_definition(outputs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.softmax(lses.double(), 0).nan_to_num(0.0)
    return (outputs.double() * weights.unsqueeze(-1)).sum(0), torch.logsumexp(lses.double(), 0)


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_parts_merged_in_any_order_are_the_whole(seed: int, is_native: bool) -> None:
    library = native.load() if is_native else None
    outputs, lses = parts(4, seed)
    expected, expected_lse = by_definition(outputs, lses)
    bound, lse_bound = merge_bounds(outputs, lses)
    seen = expected_lse > -torch.inf
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        output, lse = outputs[order[0]].clone(), lses[order[0]].clone()
        for index in order[1:]:
            merge_into(output, lse, outputs[index], lses[index], torch.arange(ROWS), library)
        assert_within(output, expected, bound)
        assert_within(lse[seen], expected_lse[seen], lse_bound)
        assert torch.equal(lse > -torch.inf, seen)
    merge_into(output, lse, outputs[0], torch.full_like(lse, float("nan")), torch.arange(ROWS), library)
    assert bool(output.isnan().all()), "NaN stays visible"


@pytest.mark.parametrize("is_native", [True, False])
def test_only_the_named_rows_change(is_native: bool) -> None:
    library = native.load() if is_native else None
    outputs, lses = parts(2, 9)
    (output, part), (lse, part_lse), rows = outputs.clone(), lses.clone(), torch.tensor([3, 1])
    merge_into(output, lse, part[rows].contiguous(), part_lse[rows].contiguous(), rows, library)
    assert torch.equal(output[[0, 2, 4]], outputs[0, [0, 2, 4]])
    merged = outputs[:, rows], lses[:, rows]
    assert_within(output[rows], by_definition(*merged)[0], merge_bounds(*merged)[0])


class Slow:
    """A `RemoteAttention` whose calls take 1 s each, with two empty results per layer."""

    now_s = 0.0

    def _work(self, *_: object) -> None:
        self.now_s += 1.0

    begin = send = end = abandon = _work

    def collect(self, layer: int) -> Iterator[Partial]:
        for _ in range(2):
            self._work()
            yield torch.zeros(0, dtype=torch.int64), NOTHING, NOTHING[..., 0]


def step(attention: PagedAttention, slow: Slow, spans: Sequence[Span]) -> None:
    attention.begin(spans, 0)
    rows = sum(span.count for span in spans)
    attention.send(0, *torch.zeros(3, rows, 1, 4), paged.Shape(1.0))
    slow.now_s += 100.0  # The caller's own work is not counted.
    attention.join(0, torch.zeros(rows, 1, 4), torch.zeros(rows, 1))
    attention.end()


def test_a_decode_steps_waiting_time_is_divided_by_its_remote_blocks() -> None:
    slow = Slow()
    attention = PagedAttention(
        [LayerShape(1, 4, 4)],
        kv_blocks=4,
        block_tokens=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
        mode="torch",
        clock=lambda: slow.now_s,
    )
    homes, meter = Homes(4), attention.meter
    homes.place(range(4, 14), 1, range(10))
    homes.place(range(14, 19), 2, range(5))
    attention.extend(homes, slow)
    step(attention, slow, [Span(9, 4, [0, 4, 5, 1])])
    assert (meter.block_s, meter.total_s) == (0.0, 5.0), "a prefill says nothing of a decode step"
    step(attention, slow, [Span(15, 1, [0, 4, 5, 6]), Span(31, 1, [1, 7, 8, 9, 10, 11, 12, 13])])
    assert meter.block_s == pytest.approx(5.0 / 10)
    step(attention, slow, [Span(20, 1, [*range(14, 19), 2])])
    assert meter.block_s == pytest.approx(0.5 + 0.1 * (1.0 - 0.5)) and meter.total_s == 15.0
