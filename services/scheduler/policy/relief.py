"""What to do when memory runs out: one rung of one ladder, chosen by measured costs (`algorithms.md` §7).

No paper says how the five mechanisms meet. Each rung names blocks that it could free and what that costs in
seconds of waiting: by measured bandwidths, speeds and stalls, not by constants. The cheapest per block that
is needed is taken, one rung at a time; whoever still lacks blocks asks again. The ladder's order breaks ties
only (costs within `TIE_SHARE` of each other). Every rung can be switched off. Pure: one function, one state.

    4 blocks are needed. Evict offers 1 for 0.2 ms: 0.2 ms a block. Migrate offers 10 for 6 ms: only 4 of
    them count, 1.5 ms a block. Recompute offers 10 for 40 ms: 10 ms a block. → Evict. The 3 that still lack
    are asked for again, and unless there is more to evict by then, migrate is taken.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

TIE_SHARE = 0.05
"""Costs per block as close as this count as equal: the ladder's order decides."""
_TIE_S = 1e-9
BY_KV, BY_TOKENS = "by KV", "by tokens"
"""Reasons of an offer to migrate: what travels."""


class Rung(StrEnum):
    """What can be done about memory that runs out. The order is the ladder's: it decides between equals."""

    EVICT = "evict"
    """Unreferenced prefix blocks, down a tier."""
    RESERVE = "reserve"
    """Blocks held back for this."""
    EXPAND = "expand"
    """Pie: one more layer on the host."""
    BORROW = "borrow"
    """rBlocks of a neighbour."""
    MIGRATE = "migrate"
    """A request, to another worker (MELL)."""
    PAUSE = "pause"
    """Offload-free preemption: it stops and keeps its blocks, so that others' ends free what is needed."""
    SWAP = "swap"
    """A request's KV to the host."""
    RECOMPUTE = "recompute"
    """A request's KV is dropped, and computed again later."""


LADDER = tuple(Rung)


@dataclass(frozen=True, slots=True)
class ReliefSpeeds:
    """Measured at this worker; 0: not measured, which rules out what depends on it."""

    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    host_blocks_per_s: float = 0.0
    """Copied between device and host, either way."""
    link_blocks_per_s: float = 0.0
    """Copied to a neighbour."""
    remote_attention_s: float = 0.0
    """That a step takes longer for each block that lies at a neighbour."""
    stall_s: float = 0.0
    """That a step would take longer with one more layer on the host (Pie)."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The worker that is best placed to help, as far as is known."""

    lendable_blocks: int = 0
    room_blocks: int = 0
    """For a request that moves there; its growth included."""
    is_linked: bool = False
    """KV can be sent there; else a request moves by its tokens."""


@dataclass(frozen=True, slots=True)
class Victim:
    """The request that would make way, lowest priority."""

    blocks: int
    tokens: int
    """Prompt and answer so far."""
    remaining_tokens: int
    """Predicted."""


@dataclass(frozen=True, slots=True)
class MemoryPressure:
    """One worker's state at the moment somebody needs blocks."""

    needed_blocks: int
    block_tokens: int
    running: int
    """Requests that a longer step makes wait."""
    horizon_steps: int
    """For how many steps the blocks will be needed."""
    speeds: ReliefSpeeds
    evictable_blocks: int = 0
    evictable_hits_per_s: float = 0.0
    """How often one block of them is asked for again."""
    host_tier_blocks: int = 0
    """Free on the host, for evicted or swapped blocks."""
    reserve_blocks: int = 0
    growable_blocks: int = 0
    """By one more step of Pie's expansion."""
    neighbour: Neighbour = field(default_factory=Neighbour)
    victim: Victim | None = None
    frees_within_steps: int | None = None
    """When the next request ends, as predicted; None: not known."""
    frees_blocks: int = 0
    """That come free with it."""


@dataclass(frozen=True, slots=True)
class RungOffer:
    """What one rung could do now: how many blocks it would free, and what that costs."""

    rung: Rung
    blocks: int
    cost_s: float
    """Seconds of waiting that it brings, over all requests concerned."""
    reason: str


@dataclass(frozen=True, slots=True)
class Relief:
    """The decision, with everything it was weighed against: what the log says."""

    chosen: RungOffer | None
    """None: nothing is left; what needs the blocks waits."""
    offers: tuple[RungOffer, ...]

    @property
    def reason(self) -> str:
        """One line: the choice and the costs behind it."""
        listed = ", ".join(
            f"{offer.rung} {offer.blocks} blocks for {offer.cost_s * 1e3:.3g} ms ({offer.reason})"
            for offer in self.offers
        )
        return f"{self.chosen.rung if self.chosen else 'wait'} of {listed or 'nothing'}"


def next_relief(pressure: MemoryPressure, switched_off: frozenset[Rung] = frozenset()) -> Relief:
    """The rung to take now. Raises ValueError when no blocks are needed."""
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
    """By cost for each block that is used; the first of the ladder among those as good as equal."""
    if not offers:
        return None

    def cost_s(offer: RungOffer) -> float:
        return offer.cost_s / min(offer.blocks, needed)

    least_s = min(map(cost_s, offers))
    return next(offer for offer in offers if cost_s(offer) <= least_s * (1 + TIE_SHARE) + _TIE_S)


def _offers(rung: Rung, pressure: MemoryPressure) -> Iterator[RungOffer]:
    yield from _BY_RUNG[rung](pressure)


def _evict(p: MemoryPressure) -> Iterator[RungOffer]:
    """A block that is wanted again costs a load from the host, or its recomputation, at that rate."""
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
    """Every running request waits for the stall in every step."""
    cost_s = p.speeds.stall_s * p.horizon_steps * p.running
    yield RungOffer(Rung.EXPAND, p.growable_blocks, cost_s, f"{p.speeds.stall_s * 1e3:.3g} ms a step")


def _borrow(p: MemoryPressure) -> Iterator[RungOffer]:
    """The same for attention over blocks that lie elsewhere."""
    blocks = min(p.neighbour.lendable_blocks, p.needed_blocks)
    if not p.neighbour.is_linked or p.speeds.remote_attention_s <= 0:
        return
    step_s = blocks * p.speeds.remote_attention_s
    yield RungOffer(
        Rung.BORROW, blocks, step_s * p.horizon_steps * p.running, f"{step_s * 1e3:.3g} ms a step"
    )


def _migrate(p: MemoryPressure) -> Iterator[RungOffer]:
    """The victim goes on meanwhile: it waits for the switch, one step; what is computed twice, others wait
    for."""
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
    """Frees nothing itself: the blocks come when another ends, and until then those wait that need one."""
    if p.frees_within_steps is None or p.speeds.decode_step_s <= 0:
        return
    waiting = max(1, min(p.running, p.needed_blocks))
    cost_s = p.frees_within_steps * p.speeds.decode_step_s * waiting
    yield RungOffer(Rung.PAUSE, p.frees_blocks, cost_s, f"one ends within {p.frees_within_steps} steps")


def _swap(p: MemoryPressure) -> Iterator[RungOffer]:
    """Out and in again, and it waits as long as the blocks are needed."""
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
    """Of a request that was taken off: until the blocks are there again."""
    return p.horizon_steps * p.speeds.decode_step_s


def _per(amount: float, speed_per_s: float) -> float:
    """Infinite where the speed was never measured."""
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
