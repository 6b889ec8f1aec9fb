"""Tokens computed layer by layer while the swap controller of Pie's paper moves layers, in simulated time.

Time is counted in whole ticks, so that events that fall together do so exactly; among them a layer's end
comes first, then completed transfers, then the next layer's start. Source: papers/004 figure 4.
"""

from dataclasses import dataclass, field
from fractions import Fraction

from services.worker.pie.core.meter import Direction
from services.worker.pie.core.sizes import device_slots
from sim.pie.swap import SwapController, SwapTransfer


@dataclass(frozen=True, slots=True)
class Pace:
    """Ticks of one layer: computing it, copying it in, copying it out."""

    compute: int
    swap_in: int
    swap_out: int


@dataclass(slots=True)
class Timeline:
    """Runs tokens one after the other; `stalls` counts the ticks that each token waited for KV."""

    controller: SwapController
    pace: Pace
    now: int = 0
    stalls: list[int] = field(default_factory=list)
    fifo_ticks: list[int] = field(default_factory=list)
    """For each swap that is over: from the begin of the swap-out to the end of the swap-in."""
    _due: dict[Direction, tuple[int, SwapTransfer]] = field(default_factory=dict)
    _left: dict[int, int] = field(default_factory=dict)

    def run(self, tokens: int) -> None:
        for _ in range(tokens):
            self.stalls.append(sum(self._layer(layer) for layer in range(self.controller.table.layers)))

    def _layer(self, layer: int) -> int:
        """How long it had to be waited for."""
        controller, began = self.controller, self.now
        self._submit(controller.on_awaited(layer, self.now))
        while not controller.table.is_present(layer):
            self._complete_until(min(due for due, _ in self._due.values()))
        controller.on_started(layer)
        controller.check_integrity()
        stalled = self.now - began
        end = self.now + self.pace.compute
        while self._due and min(due for due, _ in self._due.values()) < end:
            self._complete_until(min(due for due, _ in self._due.values()))
        self.now = end
        self._submit(controller.on_ended(layer, self.now))
        self._complete_until(self.now)
        return stalled

    def _complete_until(self, now: int) -> None:
        self.now = now
        for direction in (Direction.OUT, Direction.IN):
            due, transfer = self._due.get(direction, (now + 1, None))
            if transfer is None or due > now:
                continue
            del self._due[direction]
            if direction is Direction.IN and transfer.layer in self._left:
                self.fifo_ticks.append(now - self._left.pop(transfer.layer))
            self._submit(self.controller.on_completed(transfer, now))

    def _submit(self, transfers: list[SwapTransfer]) -> None:
        for transfer in transfers:
            is_in = transfer.direction is Direction.IN
            self._due[transfer.direction] = (
                self.now + (self.pace.swap_in if is_in else self.pace.swap_out),
                transfer,
            )
            if not is_in:
                self._left[transfer.layer] = self.now


def block_stalls(layers: int, pace: Pace, outside: Fraction, tokens: int) -> list[Fraction]:
    """Ticks that each token waits where some blocks of all layers are outside, `outside` of each layer's.

    A layer's blocks come over the link one layer after the other, each into one of two buffers: the one that
    the layer before the last has been done with. KV that is there already is not copied out.
    """
    stalls = [Fraction(0)] * tokens
    ended = [Fraction(0), Fraction(0)]
    """Of the last layer but one, and of the last."""
    link_free = Fraction(0)
    for at in range(tokens * layers):
        link_free = max(link_free, ended[0]) + pace.swap_in * outside
        started = max(link_free, ended[1])
        stalls[at // layers] += started - ended[1]
        ended = [ended[1], started + pace.compute]
    return stalls


def outside_share(layers: int, fifo_layers: int) -> Fraction:
    """Of a layer's blocks, those outside in the form in blocks, where as many fit as with such a queue."""
    slots = device_slots(layers, fifo_layers)
    return Fraction(layers - slots, max(1, layers - 2))


@dataclass(frozen=True, slots=True)
class Steady:
    """What a token comes to once the queue has found its rhythm."""

    stall_share: float
    """Of the computation."""
    early_share: float
    """Of the swap-ins, those for the next token."""
    swap_ins: float


def settle(layers: int, fifo_layers: int, pace: Pace, *, warm_tokens: int = 6, tokens: int = 12) -> Steady:
    """Means per token after `warm_tokens`."""
    timeline = Timeline(SwapController(layers, fifo_layers), pace)
    timeline.run(warm_tokens)
    before_ins, before_early = timeline.controller.swap_ins, timeline.controller.early_swap_ins
    timeline.run(tokens)
    swap_ins = timeline.controller.swap_ins - before_ins
    early = timeline.controller.early_swap_ins - before_early
    stalled = sum(timeline.stalls[warm_tokens:])
    return Steady(stalled / (tokens * layers * pace.compute), early / max(1, swap_ins), swap_ins / tokens)
