"""Pie's expansion in one worker: windows of iterations judged, the FIFO's length changed, the pool told.

Called by the engine's thread between two steps. Growing: the FIFO first, slots once one is free, then, if
swaps as measured fit, blocks join the pool. Shrinking: the pool at once, what lies on doomed blocks is moved
as soon as it fits on others, then slots and the FIFO. Source: papers/004 §4.1.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from services.worker.pie.core.expansion import ExpansionController
from services.worker.pie.core.pool import ElasticPool
from services.worker.pie.core.sizes import slot_blocks
from services.worker.pie.store import LayerStore

_log = logging.getLogger("kvasir.worker.pie")
_LEAST_ITERATIONS = 4
"""Of a window."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """What a worker's Pie is at: a value to be reported upward."""

    fifo_layers: int
    capacity_blocks: int
    """What plans may count on."""
    growable_blocks: int
    """More, if the FIFO grew by one."""
    stall_share: float

    def details(self) -> dict[str, float]:
        """For a worker's status."""
        return {
            "pie_fifo_layers": self.fifo_layers,
            "pie_growable_blocks": self.growable_blocks,
            "pie_stall_share": round(self.stall_share, 5),
        }


class Growth:
    """Drives a store's length towards what the controller wants; without one it stays as it is."""

    def __init__(
        self,
        store: LayerStore,
        device_blocks: int,
        controller: ExpansionController | None,
        window_iterations: int,
        clock: Callable[[], float],
        *,
        notice_s: float = 0.0,
    ) -> None:
        """`notice_s`: between the announcement that blocks will go and their going, so that plans follow."""
        self._store, self._controller, self._clock = store, controller, clock
        self._device_blocks, self._window_iterations = device_blocks, window_iterations
        self._pool: ElasticPool | None = None
        self._wanted = self._granted = store.controller.fifo_layers
        self._iterations = 0
        self._notice_s, self._announced_s = notice_s, 0.0

    @property
    def capacity_blocks(self) -> int:
        """What plans may count on from the next one on."""
        return self._blocks(self._granted)

    @property
    def is_resizing(self) -> bool:
        controller = self._store.controller
        is_recut = self._wanted == controller.fifo_layers and controller.excess_slots == 0
        return not is_recut or self._granted != self._wanted

    def attach(self, pool: ElasticPool) -> None:
        """The pool whose size follows; its blocks are what is copied."""
        self._pool = pool
        self._store.attach(pool.taken, lambda: pool.taken_blocks)
        pool.growable_blocks = self.expansion().growable_blocks

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
        if self._is_window_over():
            window = self._store.meter.close_window(
                self._iterations, self._store.controller, self.capacity_blocks
            )
            self._iterations = 0
            if self._controller is not None:
                self.want(self._controller.on_window(window, is_resizing=self.is_resizing))
        if self.is_resizing:
            self._go_on(self._pool)

    def _is_window_over(self) -> bool:
        """Also once it has waited so long that the rest cannot change what will be said of it."""
        meter, iterations, controller = self._store.meter, self._window_iterations, self._controller
        if controller is None or self._iterations >= iterations:
            return self._iterations >= iterations
        is_hopeless = meter.window_stall_s() > controller.heavy_share * iterations * meter.step_s > 0
        return is_hopeless and self._iterations >= _LEAST_ITERATIONS

    def want(self, fifo_layers: int) -> None:
        """Begin to change the FIFO's length; one change at a time, and none without a pool."""
        if fifo_layers == self._wanted or self.is_resizing or self._pool is None:
            return
        _log.info("swap queue of %d layers, was %d", fifo_layers, self._wanted)
        is_growing = fifo_layers > self._wanted
        self._wanted = fifo_layers
        if is_growing:
            self._store.meter.forget_swaps()
            self._store.set_fifo(fifo_layers)
        else:
            self._grant(self._pool)

    def _go_on(self, pool: ElasticPool) -> None:
        controller = self._store.controller
        if controller.fifo_layers > self._wanted:
            if not self._is_drained(pool):
                return
            self._store.set_fifo(self._wanted)
        if controller.excess_slots and not self._store.resize():
            return
        if controller.excess_slots == 0 and self._granted != self._wanted:
            self._conclude(pool)

    def _is_drained(self, pool: ElasticPool) -> bool:
        if self._clock() - self._announced_s < self._notice_s:
            return False
        if not pool.is_drained and (moves := pool.compact()):
            self._store.move_blocks(moves)
        if pool.is_drained:
            pool.cut()
        return pool.doomed_blocks == 0

    def _conclude(self, pool: ElasticPool) -> None:
        """A raise: its blocks are given out once swaps are known to fit; else it is taken back."""
        fits = True if self._controller is None else self._fits(self._controller)
        if fits:
            self._grant(pool)
        elif fits is not None and self._controller is not None:
            self._wanted = self._controller.refuse()
            _log.info("swap queue of %d layers again: the link is too slow", self._wanted)
            self._store.set_fifo(self._wanted)

    def _fits(self, controller: ExpansionController) -> bool | None:
        """None while too few swaps were seen."""
        pace = self._store.meter.pace()
        if pace is None:
            return None
        ratio = self._blocks(self._wanted) / self.capacity_blocks
        return controller.fits(*pace, ratio)

    def _grant(self, pool: ElasticPool) -> None:
        self._granted, self._announced_s = self._wanted, self._clock()
        pool.resize(self.capacity_blocks)
        pool.growable_blocks = self.expansion().growable_blocks

    def _blocks(self, fifo_layers: int) -> int:
        layers = self._store.controller.table.layers
        return slot_blocks(layers, fifo_layers, self._device_blocks)
