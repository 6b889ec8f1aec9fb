"""Waits, their accounting, and errors of copies; with the real threads and a real throttle."""

import random
import time

import pytest
import torch

from services.worker.pie import memory
from services.worker.pie.copier import InlineCopier
from services.worker.pie.core.swap import Direction, SwapController
from services.worker.pie.paced_link import PacedLink
from services.worker.pie.store import LayerStore
from shared.clock import monotonic_s
from shared.errors import InternalError
from tests.services.worker.pie.rig import BLOCKS, LAYERS, SHAPE, make_memory, make_store, step


def test_bytes_stay_and_waits_are_counted_by_layer() -> None:
    store, expected = make_store(4, BLOCKS * SHAPE.block_bytes / 0.004), [0.0] * LAYERS

    def write(layer: int, keys: torch.Tensor) -> None:
        # What begins on the host was never written: nobody reads such blocks.
        assert expected[layer] == 0 or bool((keys[:BLOCKS] == expected[layer]).all())
        expected[layer] += layer + 1
        keys[:BLOCKS] = expected[layer]

    try:
        for _ in range(6):
            step(store, 0.0, write)
        meter = store.meter
        assert meter.iterations == 6
        assert min(meter.moved_bytes.values()) >= BLOCKS * SHAPE.block_bytes * 6
        assert sum(meter.stall_s) > 0.02 and sum(meter.stalls) > 6
        assert meter.stall_share > 1
    finally:
        assert store.close(5.0)


def test_a_store_without_a_queue_waits_for_nothing() -> None:
    store = make_store(0, 1.0)
    try:
        assert store.is_static
        for _ in range(3):
            step(store, 0.0, lambda layer, keys: None)
        assert store.meter.stall_share == 0 and sum(store.meter.moved_bytes.values()) == 0
        window = store.meter.close_window(3, store.controller, BLOCKS)
        assert (window.tokens, window.used_blocks, window.swap_ins) == (12, BLOCKS, 0)
    finally:
        assert store.close(5.0)


def test_while_nothing_moves_nobody_is_asked_which_blocks_are_in_use() -> None:
    """A pool of thousands of blocks is walked through only where something is copied."""
    store, asked = make_store(0, 0.0), [0]

    def used() -> list[int]:
        asked[0] += 1
        return list(range(BLOCKS))

    store.attach(used, lambda: BLOCKS)
    try:
        step(store, 0.0, lambda layer, keys: None)
        assert asked == [0] and store.is_static
        store.set_fifo(4)
        for _ in range(3):
            step(store, 0.0, lambda layer, keys: None)
        assert 3 <= asked[0] <= 4 and sum(store.meter.moved_bytes.values()) > 0
    finally:
        assert store.close(5.0)


def test_a_failed_copy_is_an_error_of_the_step() -> None:
    store = make_store(4, 0.0)
    store.attach(lambda: [0, 10_000])
    try:
        with pytest.raises(InternalError, match="a copy of KV failed"):
            for _ in range(3):
                step(store, 0.0, lambda layer, keys: None)
    finally:
        assert store.close(5.0)


@pytest.mark.parametrize("seed", range(4))
def test_no_layer_is_computed_without_its_kv_whatever_changes(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real threads and bytes; queue, slots and blocks change while each layer checks what it wrote."""
    if seed % 2:  # Without holes: nothing but the blocks in use travels.
        monkeypatch.setattr(memory, "_HOLE_BYTES", 0)
    dice, store = random.Random(seed), make_store(0, BLOCKS * SHAPE.block_bytes / 0.0005)
    blocks = list(range(BLOCKS))
    store.attach(lambda: sorted(blocks))
    written = [dict.fromkeys(range(BLOCKS), 0.0) for _ in range(LAYERS)]

    def check_and_write(layer: int, keys: torch.Tensor) -> None:
        assert store.controller.table.is_present(layer)
        expected = written[layer]
        assert [float(keys[block].flatten()[0]) for block in blocks] == [expected[block] for block in blocks]
        assert [float(keys[block].min()) for block in blocks] == [
            float(keys[block].max()) for block in blocks
        ]
        block = dice.choice(blocks)
        expected[block] += 1.0
        keys[block] = expected[block]

    try:
        for _ in range(60):
            step(store, 0.0, check_and_write)
            store.check_integrity()
            if store.controller.excess_slots == 0 and dice.random() < 0.3:
                store.set_fifo(dice.choice([0, 3, 4, 5]))
            if store.controller.excess_slots < 0 or store.controller.can_retire_slot:
                store.resize()
            elif dice.random() < 0.2:
                gone = dice.choice(blocks)
                free = next((block for block in range(gone) if block not in blocks), None)
                blocks.remove(gone)
                if free is not None:
                    blocks.append(free)
                    store.move_blocks({gone: free})
                    for expected in written:
                        expected[free] = expected[gone]
        assert sum(store.meter.moved_bytes.values()) > 0
    finally:
        assert store.close(5.0)


def test_without_overlap_a_copy_is_over_before_anything_goes_on() -> None:
    layers = make_memory(LAYERS, BLOCKS, 4)
    links = {direction: PacedLink(0.0, monotonic_s, time.sleep) for direction in Direction}
    copier = InlineCopier(layers, links, monotonic_s)
    store = LayerStore(SwapController(LAYERS, 4), layers, copier, monotonic_s, wait_timeout_s=1.0)
    store.attach(lambda: list(range(BLOCKS)))
    expected = [0.0] * LAYERS

    def write(layer: int, keys: torch.Tensor) -> None:
        assert not store.controller.in_flight
        assert expected[layer] == 0 or bool((keys[:BLOCKS] == expected[layer]).all())
        expected[layer] += layer + 1
        keys[:BLOCKS] = expected[layer]

    for _ in range(4):
        step(store, 0.0, write)
    assert store.meter.copying_s > 0 and store.meter.stall_share == 0
    assert store.close(1.0)
