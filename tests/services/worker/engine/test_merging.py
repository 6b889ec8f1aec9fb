"""Partial attentions joined: exact for any partition and order, in C++ and in torch."""

import pytest
import torch

from services.worker.engine.native import library as native
from services.worker.engine.remote import merge_into, merge_partials
from tests.rounding import assert_within, merge_bounds

ROWS, HEADS, DIM = 5, 3, 20


def parts(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and log-sum-exps, some of them of parts that saw nothing."""
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
def test_one_after_the_other_is_all_at_once(seed: int, is_native: bool) -> None:
    library = native.load() if is_native else None
    outputs, lses = parts(4, seed)
    expected, expected_lse = by_definition(outputs, lses)
    together, together_lse = merge_partials(list(outputs), list(lses))
    bound, lse_bound = merge_bounds(outputs, lses)
    assert_within(together, expected, bound)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        output, lse = outputs[order[0]].clone(), lses[order[0]].clone()
        for index in order[1:]:
            merge_into(output, lse, outputs[index], lses[index], torch.arange(ROWS), library)
        assert_within(output, expected, bound)
        seen = expected_lse > -torch.inf
        assert_within(lse[seen], expected_lse[seen], lse_bound)
        assert torch.equal(lse > -torch.inf, seen)
    assert torch.equal(together_lse > -torch.inf, expected_lse > -torch.inf)


@pytest.mark.parametrize("is_native", [True, False])
def test_only_the_rows_named_change(is_native: bool) -> None:
    library = native.load() if is_native else None
    (output, part), (lse, part_lse) = parts(2, 9)
    before, rows = output.clone(), torch.tensor([3, 1])
    merge_into(output, lse, part[rows].contiguous(), part_lse[rows].contiguous(), rows, library)
    assert torch.equal(output[[0, 2, 4]], before[[0, 2, 4]])
    merged = torch.stack([before[rows], part[rows]]), torch.stack([parts(2, 9)[1][0][rows], part_lse[rows]])
    assert_within(output[rows], by_definition(*merged)[0], merge_bounds(*merged)[0])


@pytest.mark.parametrize("is_native", [True, False])
def test_nan_stays_visible(is_native: bool) -> None:
    library = native.load() if is_native else None
    (output, part), (lse, part_lse) = parts(2, 2)
    lse.fill_(0.0)
    part_lse.fill_(float("nan"))
    merge_into(output, lse, part, part_lse, torch.arange(ROWS), library)
    assert bool(output.isnan().all())
