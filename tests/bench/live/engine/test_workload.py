"""Workloads are the same for both sides, and no prompt shares a prefix with another."""

import random

from hypothesis import given
from hypothesis import strategies as st

from bench.live.engine.workload import BatchCell, bodies, cells


@given(st.integers(1, 600), st.integers(1, 64), st.integers(0, 9))
def test_prompts_have_about_the_length_and_ids_of_the_vocabulary(context: int, batch: int, seed: int) -> None:
    cell = BatchCell(context, batch, 8)
    rounds = bodies(cell, 100, random.Random(seed))
    assert [len(one) for one in rounds] == [batch] * cell.rounds
    for body in (body for one in rounds for body in one):
        assert 0.89 * context - 1 <= len(body["prompt"]) <= 1.11 * context + 1
        assert all(0 <= token < 100 for token in body["prompt"])
        assert (body["max_tokens"], body["ignore_eos"], body["temperature"]) == (8, True, 0)


def test_the_same_seed_makes_the_same_prompts_and_they_differ_among_each_other() -> None:
    cell = BatchCell(100, 8, 4)
    first, again = (bodies(cell, 4096, random.Random(3)) for _ in range(2))
    assert first == again
    beginnings = {tuple(body["prompt"][:8]) for one in first for body in one}
    assert len(beginnings) == 8


def test_small_batches_are_repeated() -> None:
    assert [BatchCell(100, batch, 4).rounds for batch in (1, 2, 8, 64)] == [4, 4, 1, 1]
    assert BatchCell(100, 1, 5).tokens == 20


def test_cells_cover_every_combination() -> None:
    assert [cell.name for cell in cells([500, 100], [8, 1], 4)] == [
        "b1_ctx100",
        "b8_ctx100",
        "b1_ctx500",
        "b8_ctx500",
    ]
