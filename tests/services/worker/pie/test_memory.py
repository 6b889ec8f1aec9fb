"""What of a layer travels, and that it arrives; whatever happens meanwhile: `core/test_copies.py`."""

import pytest
import torch

from services.worker.pie import memory as module
from services.worker.pie.core.copies import set_of
from tests.services.worker.pie.rig import SHAPE, ignore, make_memory, runs


def test_only_used_blocks_travel() -> None:
    memory = make_memory(4, 6)
    keys, values = memory.views(1)
    keys.copy_(torch.randn_like(keys))
    values.copy_(torch.randn_like(values))
    wanted = keys.clone(), values.clone()
    used = [0, 2, 5]
    parts: list[int] = []
    assert memory.reserve(0) and not memory.reserve(0)
    assert memory.copy_out(1, 0, runs(*used), parts.append) == 3 * SHAPE.block_bytes == sum(parts)
    assert SHAPE.block_bytes == 4 * 2 * (3 + 5) * 4
    assert memory.copy_in(3, 0, runs(*used), ignore) == 3 * SHAPE.block_bytes
    for found, expected in zip(memory.views(3), wanted, strict=True):
        assert torch.equal(found[used], expected[used])
        assert not found[1].any()


def test_small_holes_travel_along_and_what_the_slot_has_not_is_refused() -> None:
    memory = make_memory(4, 6)
    assert memory.runs_in(set_of([0, 2, 5]), set_of(range(6))) == ((0, 6),)
    assert memory.runs_in(set_of([0, 2, 5]), set_of([0, 1, 2, 5])) == ((0, 3), (5, 6))
    assert memory.runs_out(set_of([0, 2, 5])) == ((0, 1), (2, 3), (5, 6))
    memory.reserve(0)
    with pytest.raises(ValueError, match="block 6 of a slot of 6"):
        memory.copy_out(1, 0, ((0, 7),), ignore)


def test_blocks_beyond_a_shrunk_slot_are_left_out() -> None:
    memory = make_memory(4, 6, fifo_layers=3)
    assert memory.runs_in(set_of([1, 7]), set_of([1, 7])) == ((1, 2), (7, 8))
    memory.shift(memory.partition.resize(4), frozenset({1, 2}))
    assert memory.runs_in(set_of([1, 7]), set_of([1, 7])) == ((1, 2),)


def test_long_runs_and_scattered_blocks_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HOLE_BYTES", 3 * SHAPE.block_bytes)
    monkeypatch.setattr(module, "_CHUNK_BYTES", 2 * SHAPE.block_bytes)
    memory = make_memory(4, 12)
    for pool in memory.views(1):
        pool.copy_(torch.randn_like(pool))
    used, parts = [0, 2, 3, 5, 6, 7, 8, 9, 11], list[int]()
    memory.reserve(2)
    assert memory.copy_out(1, 2, runs(*used), parts.append) == 9 * SHAPE.block_bytes == sum(parts)
    assert max(parts) == 2 * SHAPE.block_bytes and len(parts) == 5
    memory.copy_in(3, 2, runs(*used), ignore)
    for found, expected in zip(memory.views(3), memory.views(1), strict=True):
        assert torch.equal(found[used], expected[used]) and not found[[1, 4, 10]].any()


def test_moved_blocks_keep_their_contents_on_the_device_and_on_the_host() -> None:
    memory = make_memory(4, 6)
    keys, values = memory.views(2)
    keys.copy_(torch.randn_like(keys))
    values.copy_(torch.randn_like(values))
    memory.reserve(0)
    memory.copy_out(2, 0, runs(0, 1, 4, 5), ignore)
    memory.rename_blocks(0, {4: 1, 5: 3})  # What lay on 1 was given back meanwhile.
    memory.rename_blocks(7, {})
    wanted = [keys[[0, 4, 5]].clone(), values[[0, 4, 5]].clone()]
    memory.move_blocks(2, {4: 1, 5: 3})
    assert memory.copy_in(0, 0, runs(0, 1, 3), ignore) == 3 * SHAPE.block_bytes
    assert memory.copy_in(0, 5, runs(0, 1, 3), ignore) == 0
    for slot in (0, 2):
        for found, expected in zip(memory.views(slot), wanted, strict=True):
            assert torch.equal(found[[0, 1, 3]], expected)
