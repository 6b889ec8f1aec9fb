"""The relief ladder: picks the cheapest way to free blocks, by measured costs. Source: algorithms.md §7.

4 blocks are needed. Expand offers 1 for 0.2 ms: 0.2 ms a block. Migrate offers 10 for 6 ms: only 4 of
them count, 1.5 ms a block. Recompute offers 10 for 40 ms: 10 ms a block. → Expand. The caller asks again
for the other 3.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import inf
from typing import ClassVar

TIE_SHARE = 0.05
"""Relative difference up to which costs per block tie."""
_TIE_S = 1e-9
BY_KV, BY_TOKENS = "by KV", "by tokens"
"""Reasons of an offer to migrate: what is sent."""


@dataclass(frozen=True, slots=True)
class ReliefSpeeds:
    """Speeds measured at this worker. 0: not measured, which rules out the rungs that need it."""

    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    host_blocks_per_s: float = 0.0  # between device and host, either way
    link_blocks_per_s: float = 0.0  # to a neighbour
    remote_attention_s: float = 0.0  # extra time of a step per block at a neighbour
    stall_s: float = 0.0  # extra time of a step with one more layer on the host (Pie)


@dataclass(frozen=True, slots=True)
class Victim:
    """The request of the lowest priority, which would be moved or preempted."""

    blocks: int
    tokens: int  # tokens of prompt and answer so far
    remaining_tokens: int  # predicted remaining tokens


@dataclass(frozen=True, slots=True)
class MemoryPressure:
    """State of one worker when blocks are needed."""

    needed_blocks: int
    block_tokens: int
    running: int  # number of requests that a longer step delays
    horizon_steps: int  # number of steps for which the blocks are needed
    speeds: ReliefSpeeds
    host_tier_blocks: int = 0  # free blocks on the host, for a swap
    growable_blocks: int = 0  # blocks from one more step of Pie's expansion
    lendable_blocks: int = 0  # blocks that the worker with most room would lend
    room_blocks: int = 0  # blocks there for a request that moves, including its growth
    is_linked: bool = False  # whether KV can be sent there; otherwise a request moves by tokens
    victim: Victim | None = None
    frees_within_steps: int | None = None  # predicted steps to the next end; None if unknown
    frees_blocks: int = 0  # blocks that this end frees

    @property
    def delayed_steps(self) -> int:
        """Steps that a longer step delays: every running request waits longer in each."""
        return self.horizon_steps * self.running

    @property
    def again_s(self) -> float:
        """Time to compute the victim again."""
        return inf if self.victim is None else _per(self.victim.tokens, self.speeds.prefill_tokens_per_s)

    @property
    def absence_s(self) -> float:
        """Time for which a preempted victim is away."""
        return self.horizon_steps * self.speeds.decode_step_s


@dataclass(frozen=True, slots=True)
class RungOffer:
    """Blocks that one rung could free now, and the cost."""

    rung: str  # its `Rung.name`
    blocks: int
    cost_s: float  # seconds of waiting, summed over the affected requests
    reason: str


@dataclass(frozen=True, slots=True)
class Relief:
    """The decision and all offers, for the log."""

    chosen: RungOffer | None  # None if no rung helps; the caller waits
    offers: tuple[RungOffer, ...]

    @property
    def reason(self) -> str:
        """Return one line with the choice and the costs."""
        listed = ", ".join(
            f"{offer.rung} {offer.blocks} blocks for {offer.cost_s * 1e3:.3g} ms ({offer.reason})"
            for offer in self.offers
        )
        return f"{self.chosen.rung if self.chosen else 'wait'} of {listed or 'nothing'}"


class Rung(ABC):
    """One way to free memory for running requests. A new one is a subclass, listed in `RUNGS`.

    All costs are on one scale: seconds of waiting, summed over the affected requests."""

    name: ClassVar[str]
    """Its name in settings and logs."""

    @abstractmethod
    def offer(self, p: MemoryPressure) -> RungOffer | None:
        """Return what it could free now, at an infinite cost where not measured; None if it cannot help."""


class Expand(Rung):
    """Move one more layer to the host (Pie)."""

    name = "expand"

    def offer(self, p: MemoryPressure) -> RungOffer | None:
        reason = f"{p.speeds.stall_s * 1e3:.3g} ms a step"
        return RungOffer(self.name, p.growable_blocks, p.speeds.stall_s * p.delayed_steps, reason)


class Borrow(Rung):
    """Borrow a neighbour's rBlocks."""

    name = "borrow"

    def offer(self, p: MemoryPressure) -> RungOffer | None:
        if not p.is_linked or p.speeds.remote_attention_s <= 0:
            return None
        blocks = min(p.lendable_blocks, p.needed_blocks)
        step_s = blocks * p.speeds.remote_attention_s
        return RungOffer(self.name, blocks, step_s * p.delayed_steps, f"{step_s * 1e3:.3g} ms a step")


class Migrate(Rung):
    """Migrate a request to another worker (MELL)."""

    name = "migrate"

    def offer(self, p: MemoryPressure) -> RungOffer | None:
        victim = p.victim
        if victim is None or victim.blocks - (-victim.remaining_tokens // p.block_tokens) > p.room_blocks:
            return None
        # The victim waits one step for the switch; other requests wait while the target recomputes.
        by_link_s = _per(victim.blocks, p.speeds.link_blocks_per_s) if p.is_linked else inf
        cost_s = min(p.again_s, by_link_s) + p.speeds.decode_step_s
        return RungOffer(self.name, victim.blocks, cost_s, BY_KV if by_link_s < p.again_s else BY_TOKENS)


class Pause(Rung):
    """Stop a request that keeps its blocks, until other requests end (offload-free preemption)."""

    name = "pause"

    def offer(self, p: MemoryPressure) -> RungOffer | None:
        within, step_s = p.frees_within_steps, p.speeds.decode_step_s
        if within is None or step_s <= 0:
            return None
        # Blocks come when another request ends, and requests that need one wait until then.
        cost_s = within * step_s * max(1, min(p.running, p.needed_blocks))
        return RungOffer(self.name, p.frees_blocks, cost_s, f"one ends within {within} steps")


class SwapOut(Rung):
    """Move a request's KV to the host."""

    name = "swap"

    def offer(self, p: MemoryPressure) -> RungOffer | None:
        if p.victim is None or p.victim.blocks > p.host_tier_blocks:
            return None
        copies_s = 2 * _per(p.victim.blocks, p.speeds.host_blocks_per_s)
        return RungOffer(self.name, p.victim.blocks, copies_s + p.absence_s, "out and in again")


class Recompute(Rung):
    """Drop a request's KV and compute it again later."""

    name = "recompute"

    def offer(self, p: MemoryPressure) -> RungOffer | None:
        if p.victim is None:
            return None
        return RungOffer(self.name, p.victim.blocks, p.again_s + p.absence_s, "computed again")


RUNGS: tuple[Rung, ...] = (Expand(), Borrow(), Migrate(), Pause(), SwapOut(), Recompute())
"""In the order that breaks ties, after eviction and the policy's reserve."""
LADDER = tuple(rung.name for rung in RUNGS)


def next_relief(pressure: MemoryPressure, switched_off: frozenset[str] = frozenset()) -> Relief:
    """Return the rung with the least cost per needed block; the caller asks again for more. Costs within
    `TIE_SHARE` tie, and the ladder's order decides. Raises ValueError if no blocks are needed."""
    if pressure.needed_blocks < 1:
        raise ValueError("nobody needs blocks")
    made = (rung.offer(pressure) for rung in RUNGS if rung.name not in switched_off)
    offers = tuple(offer for offer in made if offer is not None and offer.blocks > 0 and offer.cost_s < inf)
    costs_s = [offer.cost_s / min(offer.blocks, pressure.needed_blocks) for offer in offers]
    most_s = min(costs_s, default=0.0) * (1 + TIE_SHARE) + _TIE_S
    chosen = next((offer for offer, cost_s in zip(offers, costs_s, strict=True) if cost_s <= most_s), None)
    return Relief(chosen, offers)


def _per(amount: float, speed_per_s: float) -> float:
    """Return the time; infinite if the speed was never measured."""
    return amount / speed_per_s if speed_per_s > 0 else inf
