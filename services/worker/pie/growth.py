"""Pie's expansion in one worker: windows of iterations judged, the FIFO's length changed, the pool told.

Called by the engine's thread between two steps. Growing: the FIFO first, slots once one is free, then
blocks join the pool. Shrinking: the pool at once, slots once it is drained, then the FIFO. Source:
papers/004 §4.1.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from services.worker.pie.expansion import ExpansionController
from services.worker.pie.pool import ElasticPool
from services.worker.pie.sizes import slot_blocks
from services.worker.pie.store import LayerStore

_log = logging.getLogger("kvasir.worker.pie")


@dataclass(frozen=True, slots=True)
class Expansion:
    """What a worker's Pie is at: a value to be reported upward."""

    fifo_layers: int
    capacity_blocks: int
    """What plans may count on."""
    growable_blocks: int
    """More, if the FIFO grew by one."""
    stall_share: float


class Growth:
    """Drives a store's length towards what the controller wants; without one it stays as it is."""

    def __init__(
        self,
        store: LayerStore,
        device_blocks: int,
        controller: ExpansionController | None,
        window_iterations: int,
        clock: Callable[[], float],
    ) -> None:
        self._store, self._controller, self._clock = store, controller, clock
        self._device_blocks, self._window_iterations = device_blocks, window_iterations
        self._pool: ElasticPool | None = None
        self._wanted = self._granted = store.controller.fifo_layers
        self._iterations = 0

    @property
    def capacity_blocks(self) -> int:
        """What plans may count on from the next one on."""
        return self._blocks(self._granted)

    @property
    def is_resizing(self) -> bool:
        controller = self._store.controller
        return self._wanted != controller.fifo_layers or controller.excess_slots != 0

    def attach(self, pool: ElasticPool) -> None:
        """The pool whose size follows; its blocks are what is copied."""
        self._pool = pool
        self._store.attach(pool.taken)

    def expansion(self) -> Expansion:
        controller, now = self._controller, self._wanted
        most = controller.most if controller is not None else now
        following = self._blocks(max(3, now + 1)) if now < most else self._blocks(now)
        stall_share = self._store.meter.stall_share
        return Expansion(now, self.capacity_blocks, following - self._blocks(now), stall_share)

    def after_step(self) -> None:
        """One iteration is over: judge the window if it is complete, and go on with a change.

        Without a pool nothing changes: nobody could say that doomed blocks are free.
        """
        if self._pool is None:
            return
        self._iterations += 1
        if self._controller is not None and self._iterations >= self._window_iterations:
            window = self._store.meter.close_window(
                self._iterations, self._store.controller, self.capacity_blocks, self._clock()
            )
            self._iterations = 0
            self.want(self._controller.on_window(window, is_resizing=self.is_resizing))
        if self.is_resizing:
            self._go_on(self._pool)

    def want(self, fifo_layers: int) -> None:
        """Begin to change the FIFO's length; one change at a time, and none without a pool."""
        if fifo_layers == self._wanted or self.is_resizing or self._pool is None:
            return
        _log.info("swap queue of %d layers, was %d", fifo_layers, self._wanted)
        is_growing = fifo_layers > self._wanted
        self._wanted = fifo_layers
        if is_growing:
            self._store.set_fifo(fifo_layers)
        else:
            self._grant(self._pool)

    def _go_on(self, pool: ElasticPool) -> None:
        if self._store.controller.fifo_layers > self._wanted:
            if not pool.is_drained:
                return
            self._store.set_fifo(self._wanted)
        if self._store.resize() and not self.is_resizing and self._granted != self._wanted:
            self._grant(pool)

    def _grant(self, pool: ElasticPool) -> None:
        self._granted = self._wanted
        pool.resize(self.capacity_blocks)

    def _blocks(self, fifo_layers: int) -> int:
        layers = self._store.controller.table.layers
        return slot_blocks(layers, fifo_layers, self._device_blocks)
