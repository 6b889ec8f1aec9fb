"""The relief ladder: picks the cheapest way to free blocks, by measured costs. Source: algorithms.md §7.

4 blocks are needed. Expand offers 1 for 0.2 ms: 0.2 ms a block. Migrate offers 10 for 6 ms: only 4 of
them count, 1.5 ms a block. Recompute offers 10 for 40 ms: 10 ms a block. → Expand. The caller asks again
for the other 3.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import inf

TIE_SHARE = 0.05
"""Relative difference up to which costs per block tie."""
_TIE_S = 1e-9
_Offer = tuple[int, float, str] | None
"""Blocks, seconds of waiting summed over the affected requests, and the reason."""
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

    rung: str
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


def _expand(p: MemoryPressure) -> _Offer:
    reason = f"{p.speeds.stall_s * 1e3:.3g} ms a step"
    return p.growable_blocks, p.speeds.stall_s * p.delayed_steps, reason


def _borrow(p: MemoryPressure) -> _Offer:
    if not p.is_linked or p.speeds.remote_attention_s <= 0:
        return None
    blocks = min(p.lendable_blocks, p.needed_blocks)
    step_s = blocks * p.speeds.remote_attention_s
    return blocks, step_s * p.delayed_steps, f"{step_s * 1e3:.3g} ms a step"


def _migrate(p: MemoryPressure) -> _Offer:
    victim = p.victim
    if victim is None or victim.blocks - (-victim.remaining_tokens // p.block_tokens) > p.room_blocks:
        return None
    # The victim waits one step for the switch; other requests wait while the target recomputes.
    by_link_s = _per(victim.blocks, p.speeds.link_blocks_per_s) if p.is_linked else inf
    cost_s = min(p.again_s, by_link_s) + p.speeds.decode_step_s
    return victim.blocks, cost_s, BY_KV if by_link_s < p.again_s else BY_TOKENS


def _pause(p: MemoryPressure) -> _Offer:
    within, step_s = p.frees_within_steps, p.speeds.decode_step_s
    if within is None or step_s <= 0:
        return None
    # Blocks come when another request ends, and requests that need one wait until then.
    cost_s = within * step_s * max(1, min(p.running, p.needed_blocks))
    return p.frees_blocks, cost_s, f"one ends within {within} steps"


def _swap(p: MemoryPressure) -> _Offer:
    if p.victim is None or p.victim.blocks > p.host_tier_blocks:
        return None
    copies_s = 2 * _per(p.victim.blocks, p.speeds.host_blocks_per_s)
    return p.victim.blocks, copies_s + p.absence_s, "out and in again"


def _recompute(p: MemoryPressure) -> _Offer:
    return None if p.victim is None else (p.victim.blocks, p.again_s + p.absence_s, "computed again")


class Rung(StrEnum):
    """Ways to free memory for running requests, after eviction and the policy's reserve. Their order breaks
    ties. A new one gets a function in `RUNGS`."""

    EXPAND = "expand"  # move one more layer to the host (Pie)
    BORROW = "borrow"  # borrow a neighbour's rBlocks
    MIGRATE = "migrate"  # migrate a request to another worker (MELL)
    PAUSE = "pause"  # stop a request that keeps its blocks, until others end (offload-free preemption)
    SWAP = "swap"  # move a request's KV to the host
    RECOMPUTE = "recompute"  # drop a request's KV and compute it again later


LADDER = tuple(Rung)
RUNGS = dict(zip(Rung, (_expand, _borrow, _migrate, _pause, _swap, _recompute), strict=True))
"""Functions that return a rung's offer; None if it cannot help. The cost is infinite where not measured."""


def next_relief(pressure: MemoryPressure, switched_off: frozenset[str] = frozenset()) -> Relief:
    """Return the rung with the least cost per needed block; the caller asks again for more. Costs within
    `TIE_SHARE` tie, and the ladder's order decides. Raises ValueError if no blocks are needed."""
    if pressure.needed_blocks < 1:
        raise ValueError("nobody needs blocks")
    found = ((rung, offer(pressure)) for rung, offer in RUNGS.items() if rung not in switched_off)
    made = (RungOffer(rung, *offer) for rung, offer in found if offer is not None)
    offers = tuple(offer for offer in made if offer.blocks > 0 and offer.cost_s < inf)
    costs_s = [offer.cost_s / min(offer.blocks, pressure.needed_blocks) for offer in offers]
    most_s = min(costs_s, default=0.0) * (1 + TIE_SHARE) + _TIE_S
    chosen = next((offer for offer, cost_s in zip(offers, costs_s, strict=True) if cost_s <= most_s), None)
    return Relief(chosen, offers)


def _per(amount: float, speed_per_s: float) -> float:
    """Return the time; infinite if the speed was never measured."""
    return amount / speed_per_s if speed_per_s > 0 else inf
