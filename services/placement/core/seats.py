"""Seats sequences on workers: the rule shared by live placement and the simulator. Pure.

The policy chooses among workers with room, or else among workers that let one more sequence wait.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from services.placement.core.prefix_index import NOTHING, CachedTokens
from services.placement.core.room_table import GROWTH_BLOCKS, Shortlists
from services.placement.core.speeds import plain_tokens
from services.placement.policy.contract import CostedPolicy, PlacementPolicy, Room, is_costed
from shared.messages.commands import PlacementItem

PASSED_S = 5.0
"""How long smaller sequences may pass one that finds no room."""
_SHOWN_COSTS = 8
"""Maximum number of costs kept per choice."""


@dataclass(frozen=True, slots=True)
class SeatChoice:
    """The choice of a worker for one sequence, with its costs."""

    item: PlacementItem
    worker_id: str
    expected_tokens: int
    """Prompt tokens expected in the worker's cache."""
    pending_tokens: float
    """The other prompt tokens, as plain tokens (`core/speeds.py`)."""
    costs_s: tuple[tuple[str, float], ...]
    """Estimated cost of each possible worker, lowest first; empty if the policy gives none."""

    @property
    def cost_s(self) -> float:
        """Return the estimated cost of this worker; 0 if unknown."""
        return dict(self.costs_s).get(self.worker_id, 0.0)


def seat(
    items: Iterable[PlacementItem],
    rooms: Sequence[Room] | Shortlists,
    policy: PlacementPolicy,
    cached: Callable[[PlacementItem, str], CachedTokens] = lambda *_: NOTHING,
) -> list[SeatChoice | None]:
    """Return a choice per item, or None: it waits. Items are handled one after the other.

    If no worker has room, a `CostedPolicy` chooses among workers that let it wait; otherwise the least
    crowded one is used. Placed items pass one that finds no room until that one has waited `PASSED_S`: then
    all after it wait. An item larger than every worker blocks nobody. `cached` returns a worker's cached
    tokens of an item. Raises ValueError if the policy returns another worker.
    """
    choices: list[SeatChoice | None] = []
    costed = policy if is_costed(policy) else None
    is_held_up = False
    for item in items:
        among = rooms.of(item) if isinstance(rooms, Shortlists) else rooms
        choice = None if is_held_up else _seat_one(item, among, policy, costed, cached)
        if choice is None and item.waited_s >= PASSED_S:
            is_held_up = is_held_up or _admit(rooms, item.limit_tokens)
        choices.append(choice)
    return choices


def _admit(rooms: Sequence[Room] | Shortlists, limit_tokens: int) -> bool:
    if isinstance(rooms, Shortlists):
        return rooms.admits(limit_tokens)
    return any(limit_tokens <= room.most_tokens for room in rooms)


def _seat_one(
    item: PlacementItem,
    rooms: Sequence[Room],
    policy: PlacementPolicy,
    costed: CostedPolicy | None,
    cached: Callable[[PlacementItem, str], CachedTokens],
) -> SeatChoice | None:
    """Choose a room and deduct the item from it."""
    able = [room for room in rooms if fits(room, item)]
    has_room = bool(able)
    if not has_room:
        able = [room for room in rooms if room.places > 0 and item.limit_tokens <= room.most_tokens]
        if not able:
            return None
    for room in able:
        room.cached_tokens = cached(item, room.worker_id)
    costs: list[tuple[str, float]] = []
    if has_room or costed is not None:
        name = policy.choose(item.size_tokens, able)
        chosen = next((room for room in able if room.worker_id == name), None)
        if chosen is None:
            raise ValueError(f"{name!r} is none of the workers that it may choose")
        if costed is not None:
            costs_s = costed.costs_s(item.size_tokens, able)
            costs = sorted(zip([room.worker_id for room in able], costs_s, strict=True), key=itemgetter(1))
    else:
        chosen = max(able, key=lambda one: (one.places, one.free_tokens))
    expected = sum(chosen.cached_tokens)
    pending = plain_tokens(min(expected, item.size_tokens), item.size_tokens, chosen.preceding_share)
    chosen.pending_tokens += pending
    chosen.free_tokens -= -(-item.size_tokens // chosen.block_tokens) * chosen.block_tokens
    chosen.sequences += 1
    chosen.places -= 1
    return SeatChoice(item, chosen.worker_id, expected, pending, tuple(costs[:_SHOWN_COSTS]))


def fits(room: Room, item: PlacementItem) -> bool:
    """Return whether it has room now. An empty worker takes whatever it admits."""
    blocks = -(-item.size_tokens // room.block_tokens) + GROWTH_BLOCKS
    has_room = not room.sequences or blocks * room.block_tokens <= room.free_tokens
    return has_room and item.limit_tokens <= room.most_tokens
