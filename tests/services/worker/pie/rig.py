"""A small layer memory and a store over it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from services.worker.pie.copier import InlineCopier, PacedLink, ThreadCopier
from services.worker.pie.core.copies import Runs, runs_of, set_of
from services.worker.pie.core.sizes import Partition, device_slots
from services.worker.pie.core.swap import Direction, SwapController
from services.worker.pie.memory import BlockShape, LayerMemory
from services.worker.pie.store import LayerStore
from shared.clock import monotonic_s

SHAPE = BlockShape(kv_heads=2, head_dim=3, value_dim=5, block_tokens=4, dtype=torch.float32)
CPU = torch.device("cpu")


def make_memory(layers: int, device_blocks: int, fifo_layers: int = 0) -> LayerMemory:
    blocks = layers * device_blocks
    keys, values = torch.zeros(blocks, *SHAPE.key), torch.zeros(blocks, *SHAPE.value)
    return LayerMemory(SHAPE, Partition(blocks, device_slots(layers, fifo_layers)), CPU, keys, values)


def ignore(_: int) -> None:
    """Nobody paces these copies."""


def runs(*blocks: int) -> Runs:
    return runs_of(set_of(blocks))


LAYERS, BLOCKS = 6, 8


def links(bandwidth: float = 0.0) -> dict[Direction, PacedLink]:
    return {direction: PacedLink(bandwidth, monotonic_s, time.sleep) for direction in Direction}


@contextmanager
def make_store(
    fifo_layers: int, bandwidth: float, kind: type[ThreadCopier] | type[InlineCopier] = ThreadCopier
) -> Iterator[LayerStore]:
    """Of which all blocks are in use; closed at the end."""
    layers = make_memory(LAYERS, BLOCKS, fifo_layers)
    copier = kind(layers, links(bandwidth), monotonic_s)
    store = LayerStore(SwapController(LAYERS, fifo_layers), layers, copier, monotonic_s, wait_timeout_s=20.0)
    store.attach(lambda: list(range(BLOCKS)))
    try:
        yield store
    finally:
        assert store.close(5.0)


def nothing(layer: int, keys: torch.Tensor) -> None:
    """A layer that writes nothing."""


def step(
    store: LayerStore, compute_s: float = 0.0, write: Callable[[int, torch.Tensor], None] = nothing
) -> None:
    store.step_begins([])
    for layer in range(LAYERS):
        keys, _ = store.enter(layer)
        write(layer, keys)
        time.sleep(compute_s)
        store.leave(layer)
    store.step_ends(4, is_decoding=True)
