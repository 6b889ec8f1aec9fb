"""Shadow copies: blocks of running sequences on other workers, for the case that their worker dies. Pure.

As in a move by KV (`core/moves.py`), the source reports its tokens and the keeper fetches their blocks, but
the sequence stays. Each worker has one order at a time as source and as keeper. docs/shadows.md
"""

from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass

from services.scheduler.core.effects import AskPull, AskTokens, Effect
from services.scheduler.core.moves import Moves
from services.scheduler.core.roster import Roster
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.worker_pipeline import WorkerPipeline
from shared.messages.moves import BlocksPulled, PullBlocks
from shared.messages.reports import SequenceReport, SequenceState, WorkerReported
from shared.messages.sequence import TOKEN_BYTES, SequenceKey, SequenceRef, SequenceSpec, pack_tokens

INTERVAL_S = 0.3
"""Time between two checks of one worker, and two orders for one sequence."""
_RENEW_S = 5.0
"""Time after which a keeper with a complete copy is contacted again."""
_VALID_FOR_S, ANSWER_S = 2.0, 15.0
"""Time limit of an order, of which the next one fetches the rest, and time after which it is closed."""
_ASIDE_S = 5.0
"""Time without orders after a failed or fruitless one."""
_REST = 3.0
"""Pause of a source after an order, as a multiple of the order's duration."""
_RUNNING = frozenset({SequenceState.PREFILLING, SequenceState.DECODING})
_MOST_LOOKS = 20
"""Workers checked in one tick."""
_MOST_KEEPERS, _MOST_ASIDE = 8, 32
"""Maximum keepers of one worker, and number of following workers searched for them."""


def can_keep(source: WorkerReported, keeper: WorkerReported, limit_tokens: int) -> bool:
    """Return whether `keeper` can use blocks of `source` and run a sequence of `limit_tokens`."""
    is_kin = bool(source.fingerprint) and source.fingerprint == keeper.fingerprint
    is_linked = source.kv_block_bytes > 0 and keeper.kv_block_bytes > 0
    shares = source.caches_prefixes and keeper.caches_prefixes
    return is_kin and is_linked and shares and limit_tokens <= keeper.max_context_tokens


def is_worth(missing_tokens: int, source: WorkerReported, keeper: WorkerReported) -> bool:
    """Return whether the transfer is faster than computing there; also True if nothing is missing."""
    bytes_per_s = keeper.link_bytes_per_s.get(source.worker_id)
    if bytes_per_s is None or not missing_tokens:
        return True
    speed_tokens_per_s = keeper.prefill_tokens_per_s
    recompute_s = missing_tokens / speed_tokens_per_s if speed_tokens_per_s > 0 else 0.0
    size_bytes = missing_tokens / source.block_tokens * source.kv_block_bytes
    return bytes_per_s > 0 and size_bytes / bytes_per_s < recompute_s


def choose_keeper(
    tokens: int, limit_tokens: int, source: WorkerReported, others: Iterable[WorkerReported]
) -> str | None:
    """Return the worker to keep a copy, or None: with room for all of it first, then with free memory."""
    blocks = -(-tokens // source.block_tokens)

    def rank(one: WorkerReported) -> tuple[bool, bool, int, str]:
        plannable = one.capacity.plannable_blocks
        return (one.shadow_room_blocks >= blocks, plannable > blocks, plannable, one.worker_id)

    able = [
        one
        for one in others
        if one.shadow_room_blocks > 0
        and can_keep(source, one, limit_tokens)
        and is_worth(tokens, source, one)
    ]
    return max(able, key=rank).worker_id if able else None


@dataclass(slots=True)
class _Shadow:
    """The copy of one sequence."""

    keeper: str
    keeper_incarnation: int
    held_tokens: int = 0
    """Tokens that the keeper reported, in whole blocks."""
    next_s: float = 0.0
    """Earliest time of the next order."""
    renewed_s: float = 0.0
    """When the keeper was last contacted."""
    is_stuck: bool = False
    """Whether the last order fetched none of the missing blocks."""


@dataclass(slots=True)
class Order:
    """A fetch under way."""

    ref: SequenceRef
    source: str
    source_incarnation: int
    keeper: str
    blocks: int
    """Number of blocks to fetch."""
    began_s: float
    has_asked: bool = False
    """Whether the keeper has the order."""


class Shadowing:
    """The shadow copies of one core's workers."""

    def __init__(self, roster: Roster, moves: Moves, from_s: float) -> None:
        """`from_s`: recompute time that starts copies; 0: none."""
        self._roster = roster
        self._moves = moves
        self._from_s = from_s
        self._shadows: dict[SequenceKey, _Shadow] = {}
        self._orders: dict[SequenceRef, Order] = {}
        self._sources: set[str] = set()
        """Sources and keepers of `_orders`."""
        self._keepers: set[str] = set()
        self._ring: list[str] = []
        """All workers at the start of the current round."""
        self._next = 0
        """Index of the next worker in `_ring`."""
        self._looked: dict[str, tuple[float, WorkerReported | None]] = {}
        """By source: time of the next check, and the report in which the last one found none to copy."""
        self._aside_s: dict[tuple[int, str], float] = {}
        """By source incarnation and keeper: time until which no order follows a failure."""
        self.done = 0
        self.failed = 0
        self.fetched_bytes = 0

    def on_tick(self, now_s: float) -> list[Effect]:
        """Begin the orders that are worthwhile now."""
        if not self._from_s or len(self._roster.pipelines) < 2:
            return []
        effects: list[Effect] = []
        for order in list(self._orders.values()):
            if now_s - order.began_s > ANSWER_S:
                self.failed += 1
                self._close(order, now_s)
        for _ in range(min(_MOST_LOOKS, len(self._roster.pipelines))):
            if self._next >= len(self._ring):
                self._ring, self._next = list(self._roster.pipelines), 0
            at, self._next = self._next, self._next + 1
            pipeline = self._roster.in_step(self._ring[at])
            if pipeline is None:
                continue
            next_s, seen = self._looked.get(pipeline.worker_id, (now_s, None))
            if now_s >= next_s and pipeline.report is not seen:
                self._looked[pipeline.worker_id] = (now_s + INTERVAL_S, None)
                effects += self._look(pipeline, at, now_s)
        return effects

    def on_tokens(self, ref: SequenceRef, tokens: tuple[int, ...] | None, now_s: float) -> list[Effect]:
        """Apply the source's tokens; None if it did not reply."""
        order, sequence = self._orders.get(ref), self._roster.find(ref)
        if order is None or order.has_asked:
            return []
        if tokens is None or sequence is None or sequence.spec is None:
            self._close(order, now_s)
            return []
        packed = sequence.spec.prompt + pack_tokens(tokens)
        return [self._pull(order, sequence.spec, packed[:-TOKEN_BYTES])]  # the newest token has no KV yet

    def on_pulled(self, ref: SequenceRef, pulled: BlocksPulled | None, now_s: float) -> list[Effect]:
        """Apply the keeper's fetch; None if it fetched nothing."""
        order = self._orders.get(ref)
        if order is None:
            return []
        self._close(order, now_s)
        shadow = self._shadows.get(ref.key)
        if pulled is None:
            self.failed += 1
            self._aside_s[order.source_incarnation, order.keeper] = now_s + _ASIDE_S
            self._shadows.pop(ref.key, None)
        elif shadow is not None and shadow.keeper == order.keeper:
            self.done += 1
            self.fetched_bytes += pulled.fetched_bytes
            has_more = pulled.fetched_blocks > 0 or pulled.held_tokens > shadow.held_tokens
            shadow.is_stuck = order.blocks > 0 and not has_more and not pulled.is_cut_short
            shadow.held_tokens, shadow.renewed_s = pulled.held_tokens, now_s
            shadow.next_s = now_s + (_ASIDE_S if shadow.is_stuck else INTERVAL_S)
        return []

    def expire(self, now_s: float) -> None:
        """Drop entries that are no longer needed."""
        known = self._roster.sequences
        self._shadows = {key: one for key, one in self._shadows.items() if key in known}
        self._aside_s = {pair: until_s for pair, until_s in self._aside_s.items() if until_s > now_s}
        pipelines = self._roster.pipelines
        self._looked = {name: looked for name, looked in self._looked.items() if name in pipelines}

    def describe(self) -> dict[str, int]:
        """Return counts, for people."""
        return {
            "shadowed": sum(shadow.held_tokens > 0 for shadow in self._shadows.values()),
            "shadow_orders": self.done,
            "shadow_orders_failed": self.failed,
            "shadow_bytes": self.fetched_bytes,
        }

    def check_integrity(self) -> None:
        """Raises AssertionError when a worker has two orders."""
        sources = [order.source for order in self._orders.values()]
        keepers = [order.keeper for order in self._orders.values()]
        assert len(set(sources)) == len(sources), "two orders from one worker"
        assert len(set(keepers)) == len(keepers), "two orders to one worker"
        assert (self._sources, self._keepers) == (set(sources), set(keepers))
        assert all(order.source != order.keeper for order in self._orders.values())

    def _look(self, pipeline: WorkerPipeline, at: int, now_s: float) -> list[Effect]:
        """Check one worker's sequences, at index `at`; those with the most uncopied tokens go first."""
        source = pipeline.report
        if source.worker_id in self._sources:
            return []
        least_tokens = self._from_s * source.prefill_tokens_per_s
        if not least_tokens or not source.kv_block_bytes:
            return []
        running = [
            listed
            for listed in source.sequences
            if listed.computed_tokens >= least_tokens and listed.state in _RUNNING and listed.gateway_id
        ]
        if not running:
            self._looked[source.worker_id] = (now_s + INTERVAL_S, source)
            return []
        found = [
            (missing, sequence, listed)
            for listed in running
            if (sequence := self._roster.find(listed.ref)) is not None and sequence.spec is not None
            if (missing := self._missing(sequence, listed, source, now_s)) is not None
        ]
        found.sort(key=lambda one: (-one[0], one[1].order))
        others = self._others(source, at, now_s) if found else []
        for missing, sequence, listed in found:
            order = self._order(sequence, listed, source, others, missing, now_s)
            if order is not None:
                return self._begin(order, sequence, listed, now_s)
        return []

    def _missing(
        self, sequence: Sequence, listed: SequenceReport, source: WorkerReported, now_s: float
    ) -> int | None:
        """Return the number of tokens without a copy, or None if the sequence is not due."""
        is_elsewhere = sequence.key in self._moves.by_key or sequence.worker_id != source.worker_id
        if is_elsewhere or sequence.ref in self._orders:
            return None
        shadow = self._shadow_of(sequence, source)
        whole_tokens = listed.computed_tokens // source.block_tokens * source.block_tokens
        if shadow is None:
            return whole_tokens
        missing = max(0, whole_tokens - shadow.held_tokens)
        is_due = missing > 0 or now_s - shadow.renewed_s > _RENEW_S
        return missing if is_due and now_s >= shadow.next_s else None

    def _shadow_of(self, sequence: Sequence, source: WorkerReported) -> _Shadow | None:
        """Return the copy, or None if its keeper is gone, restarted, or runs the sequence itself."""
        shadow = self._shadows.get(sequence.key)
        if shadow is None:
            return None
        keeper = self._roster.pipelines.get(shadow.keeper)
        is_there = keeper is not None and keeper.report.incarnation == shadow.keeper_incarnation
        if is_there and shadow.keeper != source.worker_id:
            return shadow
        del self._shadows[sequence.key]
        return None

    def _order(
        self,
        sequence: Sequence,
        listed: SequenceReport,
        source: WorkerReported,
        others: Several[WorkerReported],
        missing_tokens: int,
        now_s: float,
    ) -> Order | None:
        """Return the order, or None if no keeper can take it. `others`: candidates for a new keeper."""
        shadow = self._shadow_of(sequence, source)
        whole_blocks = listed.computed_tokens // source.block_tokens
        blocks, able = missing_tokens // source.block_tokens, others
        if shadow and shadow.is_stuck and not self._roster.pipelines[shadow.keeper].report.shadow_room_blocks:
            able = [one for one in others if one.shadow_room_blocks >= whole_blocks]
        if shadow is None or able is not others:
            chosen = choose_keeper(listed.computed_tokens, sequence.limit_tokens, source, able)
            if chosen is not None:
                incarnation = self._roster.pipelines[chosen].report.incarnation
                shadow = self._shadows[sequence.key] = _Shadow(chosen, incarnation)
                blocks = whole_blocks
        if shadow is None:
            return None
        keeper = self._roster.pipelines[shadow.keeper]
        can_go = self._is_open(source, shadow.keeper, now_s)
        is_sane = can_keep(source, keeper.report, sequence.limit_tokens)
        if not can_go or not is_sane or not is_worth(blocks * source.block_tokens, source, keeper.report):
            return None
        return Order(sequence.ref, source.worker_id, source.incarnation, shadow.keeper, blocks, now_s)

    def _others(self, source: WorkerReported, at: int, now_s: float) -> list[WorkerReported]:
        """Return the reports of possible keepers for the worker at index `at`."""
        found: list[WorkerReported] = []
        able = 0
        for further in range(1, min(_MOST_ASIDE + 1, len(self._ring))):
            name = self._ring[(at + further) % len(self._ring)]
            pipeline = self._roster.in_step(name)
            if pipeline is None or not can_keep(source, pipeline.report, 0):
                continue
            able += 1
            if pipeline.report.shadow_room_blocks > 0 and self._is_open(source, name, now_s):
                found.append(pipeline.report)
            if able == _MOST_KEEPERS:
                break
        return found

    def _is_open(self, source: WorkerReported, keeper: str, now_s: float) -> bool:
        """Return whether an order from the source to the keeper is allowed."""
        return keeper not in self._keepers and self._aside_s.get((source.incarnation, keeper), now_s) <= now_s

    def _begin(self, order: Order, sequence: Sequence, listed: SequenceReport, now_s: float) -> list[Effect]:
        self._orders[order.ref] = order
        self._sources.add(order.source)
        self._keepers.add(order.keeper)
        spec = sequence.spec
        assert spec is not None
        known = spec.prompt + spec.generated
        if len(known) // TOKEN_BYTES >= listed.computed_tokens:
            return [self._pull(order, spec, known[: listed.computed_tokens * TOKEN_BYTES])]
        return [AskTokens(order.source, order.ref, is_shadow=True)]

    def _pull(self, order: Order, spec: SequenceSpec, tokens: bytes) -> Effect:
        order.has_asked = True
        pull = PullBlocks(
            source=order.source,
            source_incarnation=order.source_incarnation,
            tokens=tokens,
            cache_salt=spec.cache_salt,
            valid_for_s=_VALID_FOR_S,
            is_shadow=True,
        )
        return AskPull(order.keeper, order.ref, pull)

    def _close(self, order: Order, now_s: float) -> None:
        """Close an order and let its source rest."""
        del self._orders[order.ref]
        self._sources.discard(order.source)
        self._keepers.discard(order.keeper)
        rest_s = _REST * (now_s - order.began_s)
        self._looked[order.source] = (now_s + min(rest_s, INTERVAL_S), None)
