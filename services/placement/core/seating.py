"""Assigns waiting sequences to workers: the rule shared by live placement and the simulator.

The policy chooses among workers with room, or else among workers that let one more sequence wait. An
`Opening` tracks each worker's remaining capacity during one request. Pure.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.placement.core.prefix_index import NOTHING, CachedTokens
from services.placement.core.speeds import plain_tokens
from services.placement.policy.contract import CostedPolicy, PlacementPolicy, Room
from shared.messages.commands import PlacementItem

GROWTH_BLOCKS = 1
"""Blocks left free beside a sequence that joins others, so that its first decode preempts none."""

PASSED_S = 5.0
"""How long smaller sequences may pass one that finds no room."""


@dataclass
class Opening:
    """Remaining capacity of a worker during one request, reduced with each placed item."""

    worker_id: str
    block_tokens: int
    total_blocks: int
    most_tokens: int
    """Maximum tokens of one sequence, prompt and answer."""
    free_blocks: int
    sequences: int
    places: int = 0
    """Number of sequences that may wait there without memory for them."""
    pending_tokens: float = 0.0
    """Plain tokens, as in the speed (`core/speeds.py`)."""
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    preceding_share: float = 0.0

    def admits(self, item: PlacementItem) -> bool:
        """Return whether the whole answer could ever fit."""
        return item.limit_tokens <= self.most_tokens

    def fits(self, item: PlacementItem) -> bool:
        """Return whether it has room now. An empty worker takes whatever it admits."""
        has_room = not self.sequences or self._blocks(item) + GROWTH_BLOCKS <= self.free_blocks
        return has_room and self.admits(item)

    def takes(self, item: PlacementItem) -> bool:
        """Return whether it has room, or lets one more wait."""
        return self.fits(item) or (self.places > 0 and self.admits(item))

    def reserve(self, item: PlacementItem, cached_tokens: int = 0) -> None:
        """Deduct a placed item."""
        first = min(cached_tokens, item.size_tokens)
        self.pending_tokens += plain_tokens(first, item.size_tokens, self.preceding_share)
        self.free_blocks -= self._blocks(item)
        self.sequences += 1
        self.places -= 1

    def room(self, cached_tokens: CachedTokens = NOTHING) -> Room:
        return Room(
            worker_id=self.worker_id,
            free_tokens=self.free_blocks * self.block_tokens,
            total_tokens=self.total_blocks * self.block_tokens,
            sequences=self.sequences,
            cached_tokens=cached_tokens,
            pending_tokens=round(self.pending_tokens),
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            decode_step_s=self.decode_step_s,
            preceding_share=self.preceding_share,
        )

    def _blocks(self, item: PlacementItem) -> int:
        return -(-item.size_tokens // self.block_tokens)


@dataclass(frozen=True, slots=True)
class SeatChoice:
    """The choice of a worker for one sequence, with its costs."""

    item: PlacementItem
    worker_id: str
    expected_tokens: int
    """Prompt tokens expected in the worker's cache."""
    costs_s: tuple[tuple[str, float], ...]
    """Estimated cost of each possible worker, lowest first; empty if the policy gives none."""


def seat(
    items: Iterable[PlacementItem],
    openings: Iterable[Opening],
    policy: PlacementPolicy,
    cached: Callable[[PlacementItem, str], CachedTokens] = lambda *_: NOTHING,
    note: Callable[[SeatChoice], None] = lambda choice: None,
) -> list[str | None]:
    """Return a worker per item, or None: it waits. Items are handled one after the other.

    The policy chooses among workers with room. If none has room, a `CostedPolicy` chooses among workers that
    let it wait; otherwise the least crowded one is used. Placed items pass one that finds no room until that
    one has waited `PASSED_S`: then all after it wait. An item larger than every worker blocks nobody.
    `cached` returns a worker's cached tokens of an item; `note` is called with each choice.
    """
    openings = list(openings)
    answers: list[str | None] = []
    is_held_up = False
    for item in items:
        choice = None if is_held_up else _seat_one(item, openings, policy, cached)
        chosen = None if choice is None else next(o for o in openings if o.worker_id == choice.worker_id)
        if chosen is not None and choice is not None:
            note(choice)
            chosen.reserve(item, choice.expected_tokens)
        elif item.waited_s >= PASSED_S:
            is_held_up = is_held_up or any(opening.admits(item) for opening in openings)
        answers.append(None if chosen is None else chosen.worker_id)
    return answers


def _seat_one(
    item: PlacementItem,
    openings: list[Opening],
    policy: PlacementPolicy,
    cached: Callable[[PlacementItem, str], CachedTokens],
) -> SeatChoice | None:
    able = [opening for opening in openings if opening.fits(item)]
    has_room = bool(able)
    able = able or [opening for opening in openings if opening.takes(item)]
    if not able:
        return None
    if not has_room and not isinstance(policy, CostedPolicy):
        crowd = max(able, key=lambda one: (one.places, one.free_blocks))
        return SeatChoice(item, crowd.worker_id, sum(cached(item, crowd.worker_id)), ())
    rooms = [one.room(cached(item, one.worker_id)) for one in able]
    chosen = policy.choose(item.size_tokens, rooms)
    if chosen not in {room.worker_id for room in rooms}:
        raise ValueError(f"{chosen!r} is none of the workers that it may choose")
    expected = next(sum(room.cached_tokens) for room in rooms if room.worker_id == chosen)
    costs: list[tuple[str, float]] = []
    if isinstance(policy, CostedPolicy):
        found = zip((room.worker_id for room in rooms), policy.costs_s(item.size_tokens, rooms), strict=True)
        costs = sorted(found, key=lambda one: one[1])[:_SHOWN_COSTS]
    return SeatChoice(item, chosen, expected, tuple(costs))


_SHOWN_COSTS = 8
"""Maximum number of costs kept per choice."""
