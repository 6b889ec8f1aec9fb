"""Pie in blocks: finds while running how many blocks of all layers lie in host memory.

A *level* is the length of the paper's queue of layers, 0 or from 3 on: the device holds as many blocks as
with such a queue, and a step copies no more bytes (docs/decisions/0021). To grow, it reserves buffers, then
enlarges the pool; to shrink, it dooms blocks, then frees buffers. Source: papers/004 §3.4, §4.1."""

import logging
from collections.abc import Callable, Sequence

import torch

from services.worker.core.settings import PieSettings
from services.worker.kv.core.grown_pool import GrownPool
from services.worker.kv.tiers.resident import OpenStream, ResidentKv, StreamFigures
from services.worker.pie.core import sizes
from services.worker.pie.core.expansion import Expansion, ExpansionController, Window
from services.worker.pie.core.meter import DecodeCost, Direction, SwapMeter
from services.worker.pie.core.sizes import (
    LEAST_FIFO_LAYERS,
    higher,
    lower,
    slot_blocks,
    spare_blocks,
    swaps_in_blocks,
)
from shared.clock import monotonic_s
from shared.errors import ConfigError

_log = logging.getLogger("kvasir.worker.pie")
_DEMAND_S = 2.0
"""Seconds that a demand holds; the scheduler repeats it more often."""
_MOST_BESIDE = 2
"""Most blocks for a long sequence and the running ones, as a multiple of the device's."""
_LEAST_GAIN = 0.1
"""Least foreseen gain of throughput."""
_FULL = 0.9
"""Share of blocks in use above which more would be used."""
_WEIGHT = 0.2
"""Weight of the newest step in the time to copy a block."""


class BlockPie:
    """The expansion of one engine, called by its thread between two steps. Drives the level towards what the
    controller wants; without one it stays. `kv` has the bytes."""

    def __init__(
        self,
        kv: ResidentKv,
        device_blocks: int,
        controller: ExpansionController | None,
        fifo_layers: int,
        window_iterations: int,
        clock: Callable[[], float],
        *,
        notice_s: float = 0.0,
        block_s: float = 0.0,
        on_demand: bool = False,
        bandwidth_limit: float = 0.0,
    ) -> None:
        """`notice_s`: time between the report that blocks will go and their removal. `block_s`: first
        estimate of the time to copy one layer's block. `on_demand`: raise the level only for a sequence that
        is too long, or where `decode_cost` foresees a gain."""
        self.meter = SwapMeter()
        self.kv, self._controller, self._clock = kv, controller, clock
        self._bandwidth_limit = bandwidth_limit
        self._on_demand = on_demand
        self.watches_steps = not on_demand or fifo_layers > 0
        """Whether steps have to call `step_begins` and `step_ends`; on demand only while memory is short."""
        self.decode_cost: DecodeCost | None = None
        """None: not measured."""
        self._device_blocks = device_blocks
        self._window_iterations = window_iterations
        self._wanted = self._granted = fifo_layers
        self._iterations = 0
        self._notice_s, self._announced_s = notice_s, 0.0
        self._block_s = block_s
        self._before, self._saved_late = kv.figures(), 0
        self._began_s = 0.0
        self._pool: GrownPool | None = None
        self._needed_blocks = 0
        """Blocks demanded by a long sequence: the level does not drop below while they are used."""
        self._needed_until_s = 0.0
        self._used: Callable[[], int] = lambda: 0
        self._shed: Callable[[int], None] = lambda _: None
        self._first_blocks = self._blocks(fifo_layers)
        if not kv.set_buffers(self._spare(fifo_layers)):
            raise ValueError(f"no room for the buffers of level {fifo_layers}")

    @property
    def capacity_blocks(self) -> int:
        """Number of blocks that plans may count on."""
        return self._blocks(self._granted)

    @property
    def is_resizing(self) -> bool:
        return self._granted != self._wanted or self.kv.residency.spare_blocks != self._spare(self._wanted)

    def make_pool(self, block_tokens: int) -> GrownPool:
        """Return the pool, whose size follows the level."""
        pool = self._pool = self.kv.make_pool(self.capacity_blocks, block_tokens)
        pool.growable_blocks = self.expansion().growable_blocks
        pool.low_blocks = int((1 - _FULL) * self._first_blocks) + 1
        pool.on_low.append(self._watch_steps)
        self._used = lambda: pool.taken_blocks
        return pool

    def _watch_steps(self) -> None:
        self.watches_steps = True

    def watch(self, used_blocks: Callable[[], int], shed: Callable[[int], None]) -> None:
        """Set functions of a cache: the number of blocks in use, and one that evicts others."""
        self._used, self._shed = used_blocks, shed

    @property
    def most_blocks(self) -> int:
        """Number of blocks for a sequence that runs alone."""
        return self.capacity_blocks if self._controller is None else self._blocks(self._controller.most)

    @property
    def lendable_share(self) -> float:
        """Share of the first blocks that may be lent at any level: half of those without buffers."""
        highest = self._wanted if self._controller is None else self._controller.most
        return (self._device_blocks - self._spare(highest)) // 2 / self._first_blocks

    def expansion(self) -> Expansion:
        controller, now = self._controller, self._wanted
        is_fixed = controller is None or controller.is_holding or self._on_demand
        most = now if controller is None or is_fixed else controller.most
        following = self._blocks(max(3, now + 1)) if now < most else self._blocks(now)
        return Expansion(now, self.capacity_blocks, following - self._blocks(now), self.meter.stall_share)

    def step_begins(self) -> None:
        self._began_s = self._clock()

    def step_ends(self, tokens: int, *, is_decoding: bool) -> None:
        """Note a step that sampled so many tokens; `is_decoding`: it computed no prompt."""
        before, is_plain = self._before, self.kv.residency.is_plain
        now = self._before = before if is_plain else self.kv.figures()
        stall_s = now.stall_s - before.stall_s
        compute_s = max(0.0, self._clock() - self._began_s - stall_s)
        if stall_s:
            self.meter.on_stall(stall_s)
        if not is_plain:
            self._note_copies(before, now)
        self.meter.on_step(tokens, compute_s, stall_s, self._used(), is_decoding=is_decoding)
        self._iterations += 1
        if self._is_window_over():
            self._judge(now)
        self.rest()

    def demand(self, blocks: int) -> None:
        """Raise the level for a sequence that needs so many blocks, and for those in use beside it, up to
        twice the device. To be repeated while the sequence waits."""
        controller, pool = self._controller, self._pool
        if controller is None or pool is None:
            return
        now_s = self._clock()
        before = self._needed_blocks if now_s <= self._needed_until_s else 0
        together = max(blocks, min(blocks + self._used(), _MOST_BESIDE * self._blocks(0)))
        self._needed_blocks, self._needed_until_s = max(before, together), now_s + _DEMAND_S
        self.rest()
        if pool.doomed_blocks:  # A drop is under way.
            return
        level = self._wanted
        while level < controller.most and self._blocks(level) < self._needed_blocks:
            level = higher(level)
        self._raise_to(level, controller, pool, f"for a sequence of {blocks}")

    def _raise_to(self, level: int, controller: ExpansionController, pool: GrownPool, why: str) -> None:
        """Raise the level now; blocks in the way of buffers are copied out at once."""
        if level > self._wanted:
            controller.set_level(level)
            _log.info("level %d of blocks outside %s, was %d", level, why, self._wanted)
            self._wanted = level
            self.watches_steps = True
        if self.is_resizing and self.kv.set_buffers(self._spare(self._wanted), at_once=True):
            self._grant(pool)

    def want(self, fifo_layers: int) -> None:
        """Begin to change the level; one change at a time is made."""
        if fifo_layers < self._wanted:
            fifo_layers = self._not_below_need(fifo_layers)
        if fifo_layers == self._wanted or self.is_resizing or self._pool is None:
            return
        _log.info("level %d of blocks outside, was %d", fifo_layers, self._wanted)
        self._wanted, self.watches_steps = fifo_layers, True
        if self._blocks(fifo_layers) < self.capacity_blocks:
            self._grant(self._pool)

    def rest(self) -> None:
        """Go on with a change, between two steps or while idle."""
        if self.is_resizing and self._pool is not None:
            self._go_on(self._pool)

    def _note_copies(self, before: StreamFigures, now: StreamFigures) -> None:
        """Note the copies of a step. A swap is what level 3 copies in for each step."""
        fetched, layer_bytes = now.fetched - before.fetched, self.kv.layer_block_bytes
        if fetched:
            block_s = (now.fetch_s - before.fetch_s) / fetched
            self._block_s += (block_s - self._block_s) * (_WEIGHT if self._block_s else 1.0)
            self.meter.on_copied(Direction.IN, fetched * layer_bytes, self._swap_s(self._granted))
        saved = now.saved - before.saved
        if saved:
            took_s = now.save_s - before.save_s
            self.meter.on_copied(Direction.OUT, saved * layer_bytes * self.kv.layers, took_s)
        late, self._saved_late = self._saved_late, self.kv.residency.saved_late
        self.meter.moved_bytes[Direction.OUT] += (self._saved_late - late) * layer_bytes * self.kv.layers

    def _swap_s(self, fifo_layers: int) -> float:
        """Return the time of one of the `swaps_in_blocks` of a level."""
        buffers = self._spare(fifo_layers) * self.kv.layers // 2
        return self._block_s * buffers * self.kv.layers / max(1, swaps_in_blocks(fifo_layers))

    def _is_window_over(self) -> bool:
        """Whether the window is over, or already has too much waiting."""
        controller, iterations = self._controller, self._window_iterations
        if self._iterations >= iterations:
            return True
        if controller is None:
            return False
        compute_s = iterations * self.meter.step_s
        is_heavy = compute_s > 0 and controller.is_heavy(self.meter.window_stall_s(), compute_s)
        return self._iterations >= 4 and is_heavy

    def _judge(self, now: StreamFigures) -> None:
        """Close the window and apply what it shows."""
        window = self.meter.close_window(self._iterations, now.layers, now.early, self.capacity_blocks)
        self._iterations = 0
        controller = self._controller
        if controller is None:
            return
        is_at_rest = not self._wanted and not self.is_resizing and not controller.is_holding
        self.watches_steps = not (self._on_demand and is_at_rest) or self._is_full(window)
        if self._on_demand and not controller.is_holding:
            paying = self._paying_level(controller)
            if not paying:
                self._return(controller)
                return
            may_rise = paying > self._wanted and self._is_full(window) and not self.is_resizing
            if may_rise and self._pool is not None:
                self._raise_to(paying, controller, self._pool, "as more rows pay")
                return
        wanted = controller.on_window(window, is_resizing=self.is_resizing)
        if wanted > self._wanted and not controller.fits(self._swap_s(wanted), window.steps_s, 1.0):
            wanted = controller.refuse()
        self.want(wanted)

    def _paying_level(self, controller: ExpansionController) -> int:
        """Return the level with the highest foreseen throughput; 0: none gains enough. One raise at most
        doubles the blocks."""
        cost = self.decode_cost
        if cost is None:
            return 0
        rows = self.meter.decoding_rows * self._blocks(0) / self.capacity_blocks
        best, gain = 0, _LEAST_GAIN
        for level in range(LEAST_FIFO_LAYERS, controller.most + 1):
            if self._blocks(level) > 2 * self.capacity_blocks:
                break
            outside = self._blocks(level) - self._device_blocks + self._spare(level)
            copies_s = outside * self.kv.layers * self._block_s
            foreseen = cost.gain(rows, self._blocks(level) / self._blocks(0), copies_s)
            if foreseen > gain:
                best, gain = level, foreseen
        return best

    def _is_full(self, window: Window) -> bool:
        return window.used_blocks >= _FULL * window.capacity_blocks

    def _return(self, controller: ExpansionController) -> None:
        """Lower the level to what is still needed."""
        level = self._not_below_need(0) if self._wanted else 0
        if controller.fifo_layers != level:
            controller.set_level(level)
        self.want(level)

    def _not_below_need(self, fifo_layers: int) -> int:
        """Return a level that holds the demanded blocks, while they are used or still demanded."""
        is_used = self._used() > self._blocks(lower(self._wanted))
        if not self._needed_blocks or (self._clock() > self._needed_until_s and not is_used):
            self._needed_blocks = 0
            return fifo_layers
        while self._blocks(fifo_layers) < self._needed_blocks and fifo_layers < self._wanted:
            fifo_layers = higher(fifo_layers)
        if self._controller is not None and self._controller.fifo_layers != fifo_layers:
            self._controller.set_level(fifo_layers)
        return fifo_layers

    def _go_on(self, pool: GrownPool) -> None:
        if pool.doomed_blocks and not self._is_drained(pool):
            return
        if self.kv.set_buffers(self._spare(self._wanted)) and self._granted != self._wanted:
            self._grant(pool)

    def _is_drained(self, pool: GrownPool) -> bool:
        if self._clock() - self._announced_s < self._notice_s:
            return False
        self._shed(pool.excess_blocks)
        if pool.excess_blocks:
            return False
        pool.cut()
        return True

    def _grant(self, pool: GrownPool) -> None:
        self._granted, self._announced_s = self._wanted, self._clock()
        pool.resize(self.capacity_blocks)
        pool.growable_blocks = self.expansion().growable_blocks

    def set_background(self, bytes_s: float) -> None:
        """Set the traffic of others over the link in each direction, for experiments on a CPU."""
        self.kv.pace(self._bandwidth_limit, bytes_s)

    def close(self) -> None:
        """End the copies; the last call."""
        self.kv.close()

    def _spare(self, fifo_layers: int) -> int:
        return spare_blocks(self.kv.layers, fifo_layers, self._device_blocks)

    def _blocks(self, fifo_layers: int) -> int:
        return slot_blocks(self.kv.layers, fifo_layers, self._device_blocks)


_WAIT_TIMEOUT_S = 30.0
"""A layer that takes longer to arrive is an error."""


def assemble(
    settings: PieSettings,
    layers: Sequence[object],
    make_pools: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    open_stream: OpenStream | None,
    *,
    device_blocks: int,
    host_bytes: int,
    cache_blocks: int = 0,
) -> BlockPie:
    """Return Pie on the bytes of `device_blocks` blocks of all layers, and at most `host_bytes` of host
    memory, plus that for `cache_blocks` of a prefix cache. `make_pools` returns the memory of so many blocks
    of one layer; `layers` has each layer's shape. Raises ConfigError where Pie is impossible, such as without
    `open_stream`."""
    if open_stream is None:
        raise ConfigError(
            "pie on a GPU copies blocks with Triton, which is not installed (make setup-gpu): install it, or "
            "set pie.enabled false",
            param="pie.enabled",
        )
    if any(layer != layers[0] for layer in layers):
        raise ConfigError(
            "pie swaps blocks of layers of one shape, this model's differ: set pie.enabled false", param="pie"
        )
    count, host_blocks = len(layers), host_bytes // sum(pool.nbytes for pool in make_pools(1))
    most = sizes.most_in_blocks(count, device_blocks, host_blocks)
    if settings.fifo_layers not in (0, *range(sizes.LEAST_FIFO_LAYERS, most + 1)):
        raise ConfigError(
            f"pie: {settings.fifo_layers} is no level: 0, or from 3 to {most} of this model's {count} layers "
            f"within {host_bytes >> 20} MiB of host memory",
            param="pie.fifo_layers",
        )
    level, limit = settings.fifo_layers, settings.bandwidth_limit
    controller, highest = None, level
    if most and settings.expansion == "auto":
        controller, highest = ExpansionController(count, most, level, sizes.swaps_in_blocks), most
    blocks = sizes.slot_blocks(count, highest, device_blocks)
    kv = ResidentKv(
        open_stream,
        *make_pools(count * device_blocks),
        count,
        ids=blocks + sizes.spare_blocks(count, highest, device_blocks),
        rows=blocks,
        host_blocks=cache_blocks,
        timeout_s=_WAIT_TIMEOUT_S,
    )
    pie = BlockPie(
        kv,
        device_blocks,
        controller,
        level,
        settings.window_iterations,
        monotonic_s,
        notice_s=settings.notice_s,
        on_demand=settings.enabled == "auto",
        block_s=kv.layer_block_bytes / limit if limit else kv.profile(),
        bandwidth_limit=limit,
    )
    pie.set_background(settings.background_traffic)
    return pie
