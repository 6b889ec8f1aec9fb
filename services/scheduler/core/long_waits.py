"""Long waits: sequences too large for their worker, and work without progress. Pure.

A worker may shrink below a waiting sequence's length: it lent memory, or a lender is gone. The sequence waits
for the worker to borrow; then it goes to another worker with room, or it is refused.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from services.scheduler.core.effects import Effect, NoteStandstill, WantKvAtWorker
from services.scheduler.core.intake import beyond
from services.scheduler.core.moves import Moves
from services.scheduler.core.roster import Roster
from services.scheduler.core.rules import OversizedRules
from services.scheduler.core.sequence import Phase, Sequence
from services.scheduler.core.worker_pipeline import Sync, WorkerPipeline
from shared.errors import ContextOverflow, InvalidRequest
from shared.messages.moves import MoveMode, SequenceMove
from shared.messages.reports import Capacity
from shared.messages.sequence import SequenceKey


@dataclass(frozen=True, slots=True)
class Claim:
    """A sequence's place among those that need to borrow, and the blocks it needs."""

    order: tuple[int, float, SequenceKey]
    worker_id: str
    blocks: int
    """Total blocks it needs, including those the worker has."""


def who_may_borrow(claims: Iterable[Claim], capacities: Mapping[str, Capacity]) -> list[Claim]:
    """Return at most one claim per worker, by priority and age; always includes the first."""
    chosen: dict[str, Claim] = {}
    for claim in sorted(claims, key=lambda one: one.order):
        larger = max(chosen.get(claim.worker_id, claim), claim, key=lambda one: one.blocks)
        together = {**chosen, claim.worker_id: larger}
        if chosen and not _fit(together, capacities):
            break  # younger and smaller ones would take what this one waits for
        chosen = together
    return list(chosen.values())


def _fit(claims: Mapping[str, Claim], capacities: Mapping[str, Capacity]) -> bool:
    missing = sum(
        max(0, claim.blocks - capacities[name].total_blocks + capacities[name].borrowed_blocks)
        for name, claim in claims.items()
    )
    lenders = (capacity for name, capacity in capacities.items() if name not in claims)
    return missing <= sum(capacity.most_lent_blocks for capacity in lenders)


def gathers_from_s(roster: Roster) -> float | None:
    """Return when the first sequence arrived for which its worker has yet to borrow; None: there is none."""
    unmet = [sequence for sequence, pipeline, blocks in _deprived(roster) if blocks > pipeline.lasting_blocks]
    return min((sequence.arrival_s for sequence in unmet), default=None)


def wanted(roster: Roster, *, may_gather: bool = True) -> list[WantKvAtWorker]:
    """Return which workers must gather KV now, for sequences larger than their own; without `may_gather`,
    those that have it and keep it."""
    capacities = {report.worker_id: report.capacity for report in roster.reports()}
    claims = [
        Claim((sequence.level, *sequence.order), pipeline.worker_id, blocks)
        for sequence, pipeline, blocks in _deprived(roster)
        if pipeline.worker_id in capacities and (may_gather or blocks <= pipeline.lasting_blocks)
    ]
    return [
        WantKvAtWorker(claim.worker_id, claim.blocks * roster.pipelines[claim.worker_id].report.block_tokens)
        for claim in who_may_borrow(claims, capacities)
    ]


def _too_long(roster: Roster) -> list[Sequence]:
    """Return the sequences that exceed the own lasting KV of some worker, longest first."""
    least_tokens = min(
        (
            min(max(0, one.own_blocks) * one.report.block_tokens, one.report.max_context_tokens)
            for one in roster.pipelines.values()
            if one.sync is not Sync.REFUSED
        ),
        default=0,
    )
    return roster.longer_than(least_tokens)


def _deprived(roster: Roster) -> Iterator[tuple[Sequence, WorkerPipeline, int]]:
    """Yield the sequences that need more than their worker's own lasting blocks, and how many blocks."""
    for sequence in _too_long(roster):
        pipeline = roster.pipelines.get(sequence.worker_id or "")
        if pipeline is not None:
            blocks = -(-sequence.limit_tokens // pipeline.report.block_tokens)
            if blocks > pipeline.own_blocks:
                yield sequence, pipeline, blocks


class OversizedWatch:
    """Resolves sequences that no longer fit. Call `on_wants` whenever workers are told to gather."""

    def __init__(self, roster: Roster, moves: Moves, rules: OversizedRules) -> None:
        self._roster = roster
        self._moves = moves
        self._rules = rules
        self._since_s: dict[SequenceKey, float] = {}
        """Start of each oversized sequence's patience."""
        self._sent_on: dict[SequenceKey, None] = {}
        """Sequences that were already moved once."""

    def on_wants(self, wants: list[WantKvAtWorker], now_s: float) -> list[Effect]:
        """Resolve the sequences whose patience is over. `wants`: current orders to gather."""
        gathering = {want.worker_id: want.tokens for want in wants}
        before, self._since_s = self._since_s, {}
        effects: list[Effect] = []
        longest = self._roster.summary()[0]
        for sequence in _too_long(self._roster):
            waits_at = sequence.worker_id if sequence.phase in (Phase.PLACED, Phase.WAITING) else None
            pipeline = self._roster.pipelines.get(waits_at or "")
            if pipeline and (pipeline.sync is not Sync.IN_STEP or pipeline.holds(sequence.limit_tokens)):
                continue
            if pipeline is not None:
                patience_s = self._patience_s(sequence, pipeline, gathering)
            elif sequence.phase is Phase.QUEUED and longest is not None and sequence.limit_tokens > longest:
                patience_s = self._rules.wait_s
            else:
                continue
            since_s = before.get(sequence.key, now_s)
            if patience_s is None or sequence.key in self._moves.by_key:
                continue
            if now_s - since_s < patience_s:
                self._since_s[sequence.key] = since_s
            else:
                effects += self._resolve(sequence, pipeline, now_s)
        self._sent_on = {key: None for key in self._sent_on if key in self._roster.sequences}
        return effects

    def _patience_s(
        self, sequence: Sequence, pipeline: WorkerPipeline, gathering: dict[str, int]
    ) -> float | None:
        """Return the time the sequence may wait; None while older ones borrow first."""
        if sequence.limit_tokens > pipeline.report.max_context_tokens:
            return self._rules.wait_s
        is_its_turn = gathering.get(pipeline.worker_id, 0) >= sequence.limit_tokens
        return self._rules.gather_s if is_its_turn else None

    def _resolve(self, sequence: Sequence, pipeline: WorkerPipeline | None, now_s: float) -> list[Effect]:
        if pipeline is None:
            beyond_all = beyond(self._roster.summary()[0] or 0, sequence)
            return [self._roster.give_up(sequence, beyond_all, now_s)]
        others = [
            other for other in self._roster.others_in_step(pipeline) if other.holds(sequence.limit_tokens)
        ]
        target = max(
            others, key=lambda one: (one.report.capacity.plannable_blocks, one.worker_id), default=None
        )
        if target is not None and sequence.phase is Phase.PLACED:
            self._roster.take_back(sequence, now_s)
            self._roster.place(sequence, target, now_s)
            return [self._roster.told_of(sequence, target)]
        if target is not None and sequence.key not in self._sent_on:
            self._sent_on[sequence.key] = None
            why = "it fits no longer where it is"
            order = SequenceMove(ref=sequence.ref, target=target.worker_id, mode=MoveMode.TOKENS, why=why)
            try:
                return self._moves.begin(order, now_s)
            except InvalidRequest:
                pass  # cannot be moved: give it up below
        tokens = pipeline.report.capacity.total_blocks * pipeline.report.block_tokens
        error = ContextOverflow(
            f"{pipeline.worker_id} shrank to {tokens} tokens, and no other worker has room for the"
            f" {sequence.limit_tokens} of prompt and answer; send a shorter prompt, ask for fewer tokens, or"
            " try again when more workers run",
            param="messages",
        )
        return [self._roster.give_up(sequence, error, now_s)]


STANDSTILL_S = 15.0
"""Seconds; equal to the time a pipeline waits for a plan's next step."""
_LOOK_S = 1.0
_REPEAT_S = 60.0
ANYWHERE = "anywhere"


class Standstill:
    """Detects work that waits while nothing moves, and reports it. A place is a worker id or `ANYWHERE`.

    Sequences without a worker, or larger than their worker's own memory, wait for others; they count only if
    no worker moves."""

    def __init__(self, roster: Roster, now_s: float) -> None:
        self._roster = roster
        self._looked_s = self._noted_s = now_s
        self._since_s: dict[str, float] = {}

    def still_s(self, now_s: float) -> float:
        """Return how long something has waited without progress, or 0 below `STANDSTILL_S`."""
        longest_s = max((now_s - since_s for since_s in self._since_s.values()), default=0.0)
        return longest_s if longest_s >= STANDSTILL_S else 0.0

    def on_tick(self, now_s: float) -> list[Effect]:
        """Report a standstill when it begins, then once a minute."""
        if now_s - self._looked_s < _LOOK_S:
            return []
        was_still = self.still_s(self._looked_s) > 0
        moving = {
            pipeline.worker_id
            for pipeline in self._roster.pipelines.values()
            if pipeline.outstanding_steps > 0 or pipeline.planned_s > self._looked_s
        }
        waiting = Counter(self._roster.counts())
        waiting[ANYWHERE] = len(self._roster.backlog)
        for _, pipeline, _ in _deprived(self._roster):
            waiting[ANYWHERE] += 1
            waiting[pipeline.worker_id] -= 1
        self._since_s = {
            place: self._since_s.get(place, now_s)
            for place in +waiting
            if (not moving if place == ANYWHERE else place not in moving)
        }
        self._looked_s = now_s
        if not self.still_s(now_s) or (was_still and now_s - self._noted_s < _REPEAT_S):
            return []
        self._noted_s = now_s
        return [
            NoteStandstill(place, waiting[place], now_s - since_s)
            for place, since_s in self._since_s.items()
            if now_s - since_s >= STANDSTILL_S
        ]
