"""The relief ladder: picks the cheapest way to free blocks, by measured costs. Source: algorithms.md §7.

4 blocks are needed. Expand offers 1 for 0.2 ms: 0.2 ms a block. Migrate offers 10 for 6 ms: only 4 of
them count, 1.5 ms a block. Recompute offers 10 for 40 ms: 10 ms a block. → Expand. The caller asks again
for the other 3.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import inf

TIE_SHARE = 0.05
"""Relative difference up to which costs per block tie."""
_TIE_S = 1e-9
BY_KV, BY_TOKENS = "by KV", "by tokens"
"""Reasons of an offer to migrate: what is sent."""


class Rung(StrEnum):
    """Ways to free memory, in the order that breaks ties, after eviction and the policy's reserve."""

    EXPAND = "expand"  # move one more layer to the host (Pie)
    BORROW = "borrow"  # borrow a neighbour's rBlocks
    MIGRATE = "migrate"  # migrate a request to another worker (MELL)
    PAUSE = "pause"
    """Stop a request that keeps its blocks, until other requests end (offload-free preemption)."""
    SWAP = "swap"  # move a request's KV to the host
    RECOMPUTE = "recompute"  # drop a request's KV and compute it again later


LADDER = tuple(Rung)


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


@dataclass(frozen=True, slots=True)
class RungOffer:
    """Blocks that one rung could free now, and the cost."""

    rung: Rung
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


def next_relief(pressure: MemoryPressure, switched_off: frozenset[Rung] = frozenset()) -> Relief:
    """Return the rung with the least cost per needed block; the caller asks again for more. Costs within
    `TIE_SHARE` tie, and the ladder's order decides. Raises ValueError if no blocks are needed."""
    if pressure.needed_blocks < 1:
        raise ValueError("nobody needs blocks")
    offers = tuple(
        offer
        for offer in _offers(pressure)
        if offer.rung not in switched_off and offer.blocks > 0 and offer.cost_s < inf
    )
    costs_s = [offer.cost_s / min(offer.blocks, pressure.needed_blocks) for offer in offers]
    most_s = min(costs_s, default=0.0) * (1 + TIE_SHARE) + _TIE_S
    chosen = next((offer for offer, cost_s in zip(offers, costs_s, strict=True) if cost_s <= most_s), None)
    return Relief(chosen, offers)


def _offers(p: MemoryPressure) -> Iterator[RungOffer]:
    """Yield each rung's offer, in the ladder's order, at an infinite cost where not measured."""
    speeds, victim = p.speeds, p.victim
    delayed_steps = p.horizon_steps * p.running  # every running request waits longer in each step
    reason = f"{speeds.stall_s * 1e3:.3g} ms a step"
    yield RungOffer(Rung.EXPAND, p.growable_blocks, speeds.stall_s * delayed_steps, reason)
    if p.is_linked and speeds.remote_attention_s > 0:
        blocks = min(p.lendable_blocks, p.needed_blocks)
        step_s = blocks * speeds.remote_attention_s
        yield RungOffer(Rung.BORROW, blocks, step_s * delayed_steps, f"{step_s * 1e3:.3g} ms a step")
    again_s = inf if victim is None else _per(victim.tokens, speeds.prefill_tokens_per_s)
    if victim is not None and _fits(victim, p):
        # The victim waits one step for the switch; other requests wait while the target recomputes.
        by_link_s = _per(victim.blocks, speeds.link_blocks_per_s) if p.is_linked else inf
        cost_s = min(again_s, by_link_s) + speeds.decode_step_s
        yield RungOffer(Rung.MIGRATE, victim.blocks, cost_s, BY_KV if by_link_s < again_s else BY_TOKENS)
    if p.frees_within_steps is not None and speeds.decode_step_s > 0:
        # Blocks come when another request ends, and requests that need one wait until then.
        cost_s = p.frees_within_steps * speeds.decode_step_s * max(1, min(p.running, p.needed_blocks))
        yield RungOffer(Rung.PAUSE, p.frees_blocks, cost_s, f"one ends within {p.frees_within_steps} steps")
    if victim is not None:
        absence_s = p.horizon_steps * speeds.decode_step_s
        if victim.blocks <= p.host_tier_blocks:
            copies_s = 2 * _per(victim.blocks, speeds.host_blocks_per_s)
            yield RungOffer(Rung.SWAP, victim.blocks, copies_s + absence_s, "out and in again")
        yield RungOffer(Rung.RECOMPUTE, victim.blocks, again_s + absence_s, "computed again")


def _fits(victim: Victim, p: MemoryPressure) -> bool:
    """Return whether the neighbour has room for the victim and its growth."""
    return victim.blocks - (-victim.remaining_tokens // p.block_tokens) <= p.room_blocks


def _per(amount: float, speed_per_s: float) -> float:
    """Return the time; infinite if the speed was never measured."""
    return amount / speed_per_s if speed_per_s > 0 else inf
