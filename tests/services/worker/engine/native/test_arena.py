"""Tensors out of one mapping."""

import pytest
import torch

from services.worker.engine.native.arena import Arena


def test_tensors_lie_side_by_side_zero_and_outlive_the_arena() -> None:
    arena = Arena(100)
    first, second = arena.take(60), arena.take(40)
    assert second.data_ptr() - first.data_ptr() == 60 * 4
    assert first.data_ptr() % 64 == 0
    first.fill_(1.0)
    del arena
    assert torch.equal(second, torch.zeros(40)) and first.sum() == 60


def test_no_more_is_given_than_there_is() -> None:
    arena = Arena(10)
    arena.take(6)
    with pytest.raises(ValueError, match="5 floats wanted of 4"):
        arena.take(5)
    assert len(arena.take(4)) == 4
