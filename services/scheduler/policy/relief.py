"""The relief ladder: picks the cheapest way to free blocks, by measured costs (`algorithms.md` §7).

No paper covers how these mechanisms combine. Each rung offers a number of blocks and a cost in seconds of
waiting, from measured bandwidths, speeds and stalls. The rung with the least cost per needed block is taken;
a caller that still lacks blocks asks again. Costs within `TIE_SHARE` tie, and the ladder's order decides.
Every rung can be switched off. Pure: one function, one state.

    4 blocks are needed. Evict offers 1 for 0.2 ms: 0.2 ms a block. Migrate offers 10 for 6 ms: only 4 of
    them count, 1.5 ms a block. Recompute offers 10 for 40 ms: 10 ms a block. → Evict. The caller asks again
    for the other 3, and migrate is taken unless more can be evicted by then.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

TIE_SHARE = 0.05
"""Relative difference up to which costs per block tie."""
_TIE_S = 1e-9
BY_KV, BY_TOKENS = "by KV", "by tokens"
"""Reasons of an offer to migrate: what is sent."""


class Rung(StrEnum):
    """Ways to free memory, in the ladder's order, which breaks ties."""

    EVICT = "evict"
    """Evict unreferenced prefix blocks to a lower tier."""
    RESERVE = "reserve"
    """Use blocks held in reserve."""
    EXPAND = "expand"
    """Move one more layer to the host (Pie)."""
    BORROW = "borrow"
    """Borrow a neighbour's rBlocks."""
    MIGRATE = "migrate"
    """Migrate a request to another worker (MELL)."""
    PAUSE = "pause"
    """Stop a request that keeps its blocks, until other requests end (offload-free preemption)."""
    SWAP = "swap"
    """Move a request's KV to the host."""
    RECOMPUTE = "recompute"
    """Drop a request's KV and compute it again later."""


LADDER = tuple(Rung)


@dataclass(frozen=True, slots=True)
class ReliefSpeeds:
    """Speeds measured at this worker. 0: not measured, which rules out the rungs that need it."""

    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    host_blocks_per_s: float = 0.0
    """Between device and host, either way."""
    link_blocks_per_s: float = 0.0
    """To a neighbour."""
    remote_attention_s: float = 0.0
    """Extra time of a step per block at a neighbour."""
    stall_s: float = 0.0
    """Extra time of a step with one more layer on the host (Pie)."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The known worker that can help best."""

    lendable_blocks: int = 0
    room_blocks: int = 0
    """Blocks for a request that moves there, including its growth."""
    is_linked: bool = False
    """Whether KV can be sent there; otherwise a request moves by tokens."""


@dataclass(frozen=True, slots=True)
class Victim:
    """The request of the lowest priority, which would be moved or preempted."""

    blocks: int
    tokens: int
    """Tokens of prompt and answer so far."""
    remaining_tokens: int
    """Predicted remaining tokens."""


@dataclass(frozen=True, slots=True)
class MemoryPressure:
    """State of one worker when blocks are needed."""

    needed_blocks: int
    block_tokens: int
    running: int
    """Number of requests that a longer step delays."""
    horizon_steps: int
    """Number of steps for which the blocks are needed."""
    speeds: ReliefSpeeds
    evictable_blocks: int = 0
    evictable_hits_per_s: float = 0.0
    """Rate at which one evictable block is requested again."""
    host_tier_blocks: int = 0
    """Free blocks on the host, for eviction or swap."""
    reserve_blocks: int = 0
    growable_blocks: int = 0
    """Blocks from one more step of Pie's expansion."""
    neighbour: Neighbour = field(default_factory=Neighbour)
    victim: Victim | None = None
    frees_within_steps: int | None = None
    """Predicted steps to the next end; None if unknown."""
    frees_blocks: int = 0
    """Blocks that this end frees."""


@dataclass(frozen=True, slots=True)
class RungOffer:
    """Blocks that one rung could free now, and the cost."""

    rung: Rung
    blocks: int
    cost_s: float
    """Seconds of waiting, summed over the affected requests."""
    reason: str


@dataclass(frozen=True, slots=True)
class Relief:
    """The decision and all offers, for the log."""

    chosen: RungOffer | None
    """None if no rung helps; the caller waits."""
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
    """Return the rung to take now. Raises ValueError if no blocks are needed."""
    if pressure.needed_blocks < 1:
        raise ValueError("nobody needs blocks")
    offers = tuple(
        offer
        for rung in LADDER
        if rung not in switched_off
        for offer in _offers(rung, pressure)
        if offer.blocks > 0 and offer.cost_s < inf
    )
    return Relief(_cheapest(offers, pressure.needed_blocks), offers)


def _cheapest(offers: tuple[RungOffer, ...], needed: int) -> RungOffer | None:
    """Return the offer with the least cost per used block; ties go to the ladder's first."""
    if not offers:
        return None

    def cost_s(offer: RungOffer) -> float:
        return offer.cost_s / min(offer.blocks, needed)

    least_s = min(map(cost_s, offers))
    return next(offer for offer in offers if cost_s(offer) <= least_s * (1 + TIE_SHARE) + _TIE_S)


def _offers(rung: Rung, pressure: MemoryPressure) -> Iterator[RungOffer]:
    yield from _BY_RUNG[rung](pressure)


def _evict(p: MemoryPressure) -> Iterator[RungOffer]:
    """Offer eviction. An evicted block that is reused costs a load from the host or a recomputation."""
    blocks = min(p.evictable_blocks, p.needed_blocks)
    load_s = _per(1, p.speeds.host_blocks_per_s) if p.host_tier_blocks >= blocks else inf
    again_s = min(load_s, _per(p.block_tokens, p.speeds.prefill_tokens_per_s))
    if p.evictable_hits_per_s == 0:
        yield RungOffer(Rung.EVICT, blocks, 0.0, "nobody asks for them")
        return
    horizon_s = p.horizon_steps * p.speeds.decode_step_s
    hits = min(1.0, p.evictable_hits_per_s * horizon_s)
    yield RungOffer(Rung.EVICT, blocks, blocks * hits * again_s, f"{hits:.2g} of them wanted again")


def _reserve(p: MemoryPressure) -> Iterator[RungOffer]:
    yield RungOffer(Rung.RESERVE, min(p.reserve_blocks, p.needed_blocks), 0.0, "held back for this")


def _expand(p: MemoryPressure) -> Iterator[RungOffer]:
    """Offer expansion: every running request waits for the stall in each step."""
    cost_s = p.speeds.stall_s * p.horizon_steps * p.running
    yield RungOffer(Rung.EXPAND, p.growable_blocks, cost_s, f"{p.speeds.stall_s * 1e3:.3g} ms a step")


def _borrow(p: MemoryPressure) -> Iterator[RungOffer]:
    """Offer borrowing: every running request waits for remote attention in each step."""
    blocks = min(p.neighbour.lendable_blocks, p.needed_blocks)
    if not p.neighbour.is_linked or p.speeds.remote_attention_s <= 0:
        return
    step_s = blocks * p.speeds.remote_attention_s
    yield RungOffer(
        Rung.BORROW, blocks, step_s * p.horizon_steps * p.running, f"{step_s * 1e3:.3g} ms a step"
    )


def _migrate(p: MemoryPressure) -> Iterator[RungOffer]:
    """Offer migration. The victim waits one step for the switch; other requests wait while the target
    recomputes."""
    if p.victim is None:
        return
    growth_blocks = -(-p.victim.remaining_tokens // p.block_tokens)
    if p.victim.blocks + growth_blocks > p.neighbour.room_blocks:
        return
    by_tokens_s = _per(p.victim.tokens, p.speeds.prefill_tokens_per_s)
    by_link_s = _per(p.victim.blocks, p.speeds.link_blocks_per_s) if p.neighbour.is_linked else inf
    how = BY_KV if by_link_s < by_tokens_s else BY_TOKENS
    cost_s = min(by_tokens_s, by_link_s) + p.speeds.decode_step_s
    yield RungOffer(Rung.MIGRATE, p.victim.blocks, cost_s, how)


def _pause(p: MemoryPressure) -> Iterator[RungOffer]:
    """Offer a pause: blocks come when another request ends, and requests that need one wait until then."""
    if p.frees_within_steps is None or p.speeds.decode_step_s <= 0:
        return
    waiting = max(1, min(p.running, p.needed_blocks))
    cost_s = p.frees_within_steps * p.speeds.decode_step_s * waiting
    yield RungOffer(Rung.PAUSE, p.frees_blocks, cost_s, f"one ends within {p.frees_within_steps} steps")


def _swap(p: MemoryPressure) -> Iterator[RungOffer]:
    """Offer a swap: two copies, and the victim's wait while the blocks are needed."""
    if p.victim is None or p.victim.blocks > p.host_tier_blocks:
        return
    copies_s = 2 * _per(p.victim.blocks, p.speeds.host_blocks_per_s)
    yield RungOffer(Rung.SWAP, p.victim.blocks, copies_s + _absence_s(p), "out and in again")


def _recompute(p: MemoryPressure) -> Iterator[RungOffer]:
    if p.victim is None:
        return
    again_s = _per(p.victim.tokens, p.speeds.prefill_tokens_per_s)
    yield RungOffer(Rung.RECOMPUTE, p.victim.blocks, again_s + _absence_s(p), "computed again")


def _absence_s(p: MemoryPressure) -> float:
    """Return how long a preempted request waits for its blocks."""
    return p.horizon_steps * p.speeds.decode_step_s


def _per(amount: float, speed_per_s: float) -> float:
    """Return the time; infinite if the speed was never measured."""
    return amount / speed_per_s if speed_per_s > 0 else inf


_BY_RUNG = {
    Rung.EVICT: _evict,
    Rung.RESERVE: _reserve,
    Rung.EXPAND: _expand,
    Rung.BORROW: _borrow,
    Rung.MIGRATE: _migrate,
    Rung.PAUSE: _pause,
    Rung.SWAP: _swap,
    Rung.RECOMPUTE: _recompute,
}
