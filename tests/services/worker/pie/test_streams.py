"""Copies by CUDA streams: the same bytes and their overlap on a device; on a CPU the same copier, its events
those of a device that is always behind.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from services.worker.pie.core.sizes import Partition, device_slots
from services.worker.pie.core.swap import SwapController
from services.worker.pie.memory import BlockShape, LayerMemory
from services.worker.pie.store import LayerStore
from services.worker.pie.streams import StreamCopier
from shared.clock import monotonic_s
from shared.errors import InternalError

LAYERS, BLOCKS, FIFO_LAYERS = 9, 16, 4
on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@dataclass
class Device:
    """In place of `torch.cuda`: what is submitted is done at once, its event is seen `lag` looks later."""

    lag: int = 3
    order: list[str] = field(default_factory=list)
    streams: list["Queue"] = field(default_factory=list)

    def Stream(self, device: torch.device) -> "Queue":
        self.streams.append(Queue(f"copies-{len(self.streams)}", self))
        return self.streams[-1]

    def Event(self, enable_timing: bool = False) -> "Mark":
        return Mark(self, enable_timing)

    def current_stream(self, device: torch.device) -> "Queue":
        return Queue("computation", self)

    @contextmanager
    def stream(self, stream: "Queue") -> Iterator[None]:
        self.order.append(f"begin {stream.name}")
        yield
        self.order.append(f"end {stream.name}")


@dataclass
class Queue:
    name: str
    device: Device

    def wait_event(self, event: "Mark") -> None:
        assert event.stream == "computation", "copies wait for computations alone"
        self.device.order.append(f"{self.name} waits")

    def query(self) -> bool:
        return True


@dataclass
class Mark:
    device: Device
    has_time: bool
    stream: str = ""
    looks: int = 0

    def record(self, stream: Queue) -> None:
        assert not self.stream, "an event is recorded once"
        self.stream = stream.name

    def query(self) -> bool:
        assert self.stream
        self.looks += 1
        return self.looks > self.device.lag

    def elapsed_time(self, later: "Mark") -> float:
        assert self.has_time and later.has_time and later.looks > self.device.lag
        return 1.0


def make_store(
    device: torch.device, cuda: Any = torch.cuda, dtype: torch.dtype = torch.bfloat16, **settings: Any
) -> LayerStore:
    shape = BlockShape(4, 64, 64, 16, dtype)
    keys = torch.zeros(LAYERS * BLOCKS, *shape.key, dtype=dtype, device=device)
    values = torch.zeros(LAYERS * BLOCKS, *shape.value, dtype=dtype, device=device)
    memory = LayerMemory(
        shape, Partition(LAYERS * BLOCKS, device_slots(LAYERS, FIFO_LAYERS)), device, keys, values
    )
    copier = StreamCopier(memory, cuda=cuda, **settings)
    store = LayerStore(SwapController(LAYERS, FIFO_LAYERS), memory, copier, monotonic_s, wait_timeout_s=10)
    store.attach(lambda: list(range(BLOCKS)))
    return store


def write_and_check(store: LayerStore, step: int) -> None:
    store.step_begins([])
    for layer in range(LAYERS):
        for pool in store.enter(layer):
            written = float(10 * layer + step)
            if step:
                assert bool((pool[:BLOCKS] == written - 1).all())
            pool[:BLOCKS] = written
        store.leave(layer)
    store.step_ends(1, is_decoding=True)


@pytest.mark.parametrize("where", [pytest.param("cuda", marks=on_a_gpu), "cpu"])
def test_layers_keep_their_bytes(where: str) -> None:
    """While the queue and the slots change, too."""
    device = Device()
    store = make_store(torch.device(where), torch.cuda if where == "cuda" else device)
    for step in range(24):
        write_and_check(store, step)
        store.check_integrity()
        if step in (8, 16):
            store.set_fifo(5 if step == 8 else 3)
        if store.controller.excess_slots < 0 or store.controller.can_retire_slot:
            assert store.resize()
    assert store.controller.excess_slots == 0
    assert min(store.meter.moved_bytes.values()) > 0
    assert store.close(10)
    if where == "cpu":
        assert any(each.endswith("waits") for each in device.order)


def test_the_host_is_held_and_sees_completions_meanwhile() -> None:
    store = make_store(torch.device("cpu"), Device(lag=40), torch.float32)
    copier: Any = store._copier
    seen: deque[int] = deque()
    for step in range(3):
        store.step_begins([])
        for layer in range(LAYERS):
            swaps = store.controller.swap_ins
            store.enter(layer)
            assert len(copier._computed) <= 2
            seen.append(store.controller.swap_ins - swaps)
            store.leave(layer)
        store.step_ends(1, is_decoding=step > 0)
    assert sum(seen) > 0 and store.meter.copying_s > 0


def test_a_device_that_hangs_is_an_error() -> None:
    store = make_store(torch.device("cpu"), Device(lag=1 << 60), torch.float32, patience_s=0.05)
    with pytest.raises(InternalError, match="did not compute a layer within"):
        for layer in range(4):
            store.controller.on_awaited(layer, 0.0)
            store._copier.after_layer()
            store._copier.before_layer()
