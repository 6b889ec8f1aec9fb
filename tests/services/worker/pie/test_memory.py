"""Bytes are identical after any number of swaps, relocations and changes of size."""

import random

import pytest
import torch

from services.worker.pie import memory as module
from services.worker.pie.core.copies import set_of
from services.worker.pie.core.swap import Direction, SwapController, Transfer
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


@pytest.mark.parametrize("seed", range(4))
def test_any_number_of_swaps_and_changes_of_size(seed: int) -> None:
    """Real byte arrays under the real controller; each layer is rewritten when it is computed."""
    dice, layers, device_blocks = random.Random(seed), 6, 12
    torch.manual_seed(seed)
    memory, controller = make_memory(layers, device_blocks), SwapController(layers)
    flying: list[Transfer] = []
    used = runs(*range(device_blocks))
    wanted = [
        tuple(torch.zeros(device_blocks, *size) for size in (SHAPE.key, SHAPE.value)) for _ in range(layers)
    ]

    def complete() -> None:
        transfer = flying.pop(dice.randrange(len(flying)))
        if transfer.direction is Direction.IN:
            memory.copy_in(transfer.device_slot, transfer.host_slot, used, ignore)
        else:
            memory.reserve(transfer.host_slot)
            memory.copy_out(transfer.device_slot, transfer.host_slot, used, ignore)
        flying.extend(controller.on_completed(transfer, 0.0))

    def recut() -> None:
        controller.pause()
        while flying:
            complete()
        while controller.can_retire_slot:
            moved = controller.retire_slot()
            if moved is not None:
                memory.relocate(moved.from_slot, moved.to_slot)
        added = max(0, -controller.excess_slots)
        held = frozenset(
            each.device_slot for each in controller.table.entries if each.device_slot is not None
        )
        memory.shift(memory.partition.resize(controller.table.slots + added), held)
        for _ in range(added):
            controller.add_slot()
        flying.extend(controller.resume(0.0))

    for _ in range(60):
        for layer in range(layers):
            flying.extend(controller.on_awaited(layer, 0.0))
            while not controller.table.is_present(layer):
                complete()
            controller.on_started(layer)
            slot = controller.table.entries[layer].device_slot
            assert slot is not None
            for pool, expected in zip(memory.views(slot), wanted[layer], strict=True):
                assert torch.equal(pool[:device_blocks], expected)
                block = dice.randrange(device_blocks)
                expected[block] = torch.randn_like(expected[block])
                pool[block] = expected[block]
            flying.extend(controller.on_ended(layer, 0.0))
            if flying and dice.random() < 0.6:
                complete()
        controller.check_integrity()
        if dice.random() < 0.3 and controller.excess_slots == 0:
            flying.extend(controller.set_fifo(dice.choice([0, 3, 4, 5]), 0.0))
        if controller.excess_slots < 0 or controller.can_retire_slot:
            recut()
