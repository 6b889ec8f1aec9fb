"""Long waits: sequences too large for their worker, and work without progress. Pure.

A worker shrinks when it lends, when Pie shrinks its cache, or when a lender is gone. A sequence without KV
may then be too large for it. If borrowing cannot suffice it waits for `wait_s`, otherwise for `gather_s` from
its turn to borrow (`wanted`). Then it goes to another worker with room, or it is refused.

`Standstill` reports work that waits while nothing moves, which no policy, pool or loan should cause. It only
reports. A worker moves while it has plans or receives new ones; `outstanding` detects a hung engine.
Sequences without a worker, or larger than their worker's own memory, wait for others; they count only if no
worker moves.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
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
from shared.messages.reports import Capacity, WorkerReported
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
        together = {**chosen, claim.worker_id: _larger(claim, chosen.get(claim.worker_id))}
        if not chosen or _fit(together, capacities):
            chosen = together
        else:
            break  # younger and smaller ones would take what this one waits for
    return list(chosen.values())


def wanted(roster: Roster) -> list[WantKvAtWorker]:
    """Return which workers must gather KV now, for sequences larger than their own."""
    capacities = {report.worker_id: report.capacity for report in roster.reports()}
    claims: list[Claim] = []
    for sequence in roster.longer_than(_least_own_tokens(roster)):
        pipeline = roster.pipelines.get(sequence.worker_id or "")
        if pipeline is None or pipeline.worker_id not in capacities:
            continue
        blocks = -(-sequence.limit_tokens // pipeline.report.block_tokens)
        if is_deprived(blocks, pipeline.report.capacity):
            claims.append(Claim((sequence.level, *sequence.order), pipeline.worker_id, blocks))
    return [
        WantKvAtWorker(claim.worker_id, claim.blocks * roster.pipelines[claim.worker_id].report.block_tokens)
        for claim in who_may_borrow(claims, capacities)
    ]


def _least_own_tokens(roster: Roster) -> int:
    """Return a length in tokens that fits the own KV of every worker, after pending shrinks."""
    return min((_own_tokens(report) for report in roster.reports()), default=0)


def _own_tokens(report: WorkerReported) -> int:
    capacity = report.capacity
    blocks = capacity.total_blocks - capacity.borrowed_blocks - capacity.doomed_blocks
    return min(max(0, blocks) * report.block_tokens, report.max_context_tokens)


def is_deprived(blocks: int, capacity: Capacity) -> bool:
    """Return whether a sequence needs more than the worker's own lasting blocks."""
    return blocks > capacity.total_blocks - capacity.doomed_blocks - capacity.borrowed_blocks


def _larger(claim: Claim, other: Claim | None) -> Claim:
    return claim if other is None or claim.blocks > other.blocks else other


def _fit(claims: Mapping[str, Claim], capacities: Mapping[str, Capacity]) -> bool:
    missing = sum(
        max(0, claim.blocks - capacities[name].total_blocks + capacities[name].borrowed_blocks)
        for name, claim in claims.items()
    )
    lenders = (capacity for name, capacity in capacities.items() if name not in claims)
    return missing <= sum(capacity.most_lent_blocks for capacity in lenders)


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
        for sequence in self._roster.longer_than(_least_own_tokens(self._roster)):
            pipeline = self._oversized_at(sequence)
            if pipeline is not None:
                patience_s = self._patience_s(sequence, pipeline, gathering)
            elif self._is_beyond_all(sequence):
                patience_s = self._rules.wait_s
            else:
                continue
            since_s = before.get(sequence.key, now_s)
            if patience_s is None or self._moves.is_moving(sequence.key):
                continue
            if now_s - since_s < patience_s:
                self._since_s[sequence.key] = since_s
            else:
                effects += self._resolve(sequence, pipeline, now_s)
        self._sent_on = {key: None for key in self._sent_on if key in self._roster.sequences}
        return effects

    def _oversized_at(self, sequence: Sequence) -> WorkerPipeline | None:
        """Return the in-step pipeline where the sequence waits and does not fit."""
        if sequence.phase not in (Phase.PLACED, Phase.WAITING):
            return None
        pipeline = self._roster.pipelines.get(sequence.worker_id or "")
        is_oversized = (
            pipeline is not None and pipeline.sync is Sync.IN_STEP and not _holds(pipeline.report, sequence)
        )
        return pipeline if is_oversized else None

    def _is_beyond_all(self, sequence: Sequence) -> bool:
        """Return whether a queued sequence is longer than any worker can hold."""
        longest = self._roster.longest_context_tokens()
        return sequence.phase is Phase.QUEUED and longest is not None and sequence.limit_tokens > longest

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
            longest = self._roster.longest_context_tokens() or 0
            error = beyond(longest, sequence.prompt_tokens, sequence.max_tokens)
            return [self._roster.give_up(sequence, error, now_s)]
        others = [
            other
            for other in self._roster.pipelines.values()
            if other is not pipeline and other.sync is Sync.IN_STEP and _holds(other.report, sequence)
        ]
        target = max(
            others, key=lambda other: (other.report.capacity.plannable_blocks, other.worker_id), default=None
        )
        if target is not None and sequence.phase is Phase.PLACED:
            self._roster.take_back(sequence, now_s)
            self._roster.place(sequence, target, now_s)
            return [self._roster.told_of(sequence, target)]
        if target is not None and sequence.key not in self._sent_on:
            self._sent_on[sequence.key] = None
            order = SequenceMove(ref=sequence.ref, target=target.worker_id, mode=MoveMode.TOKENS)
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


def _holds(report: WorkerReported, sequence: Sequence) -> bool:
    """Return whether the worker's pool can hold prompt and longest answer."""
    capacity = report.capacity
    lasting_blocks = capacity.total_blocks - capacity.doomed_blocks
    needed_blocks = -(-(sequence.limit_tokens - 1) // report.block_tokens)
    return needed_blocks <= lasting_blocks and sequence.limit_tokens <= report.max_context_tokens


STANDSTILL_S = 15.0
"""Seconds; equal to the time a pipeline waits for a plan's next step."""
_LOOK_S = 1.0
_REPEAT_S = 60.0
ANYWHERE = "anywhere"


class Standstill:
    """Detects standstill in one term. A place is a worker id or `ANYWHERE`."""

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
            pipeline.worker_id for pipeline in self._roster.pipelines.values() if self._has_moved(pipeline)
        }
        waiting = self._waiting()
        self._since_s = {
            place: self._since_s.get(place, now_s)
            for place in waiting
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

    def _has_moved(self, pipeline: WorkerPipeline) -> bool:
        """Return whether the worker has or got plans since the last check."""
        return pipeline.outstanding_steps > 0 or pipeline.planned_s > self._looked_s

    def _waiting(self) -> dict[str, int]:
        """Return the number of sequences by the place that must move for them."""
        counts = Counter(self._roster.counts())
        counts[ANYWHERE] = len(self._roster.backlog)
        for sequence in self._roster.longer_than(_least_own_tokens(self._roster)):
            pipeline = self._roster.pipelines.get(sequence.worker_id or "")
            if pipeline is not None:
                blocks = -(-sequence.limit_tokens // pipeline.report.block_tokens)
                if is_deprived(blocks, pipeline.report.capacity):
                    counts[ANYWHERE] += 1
                    counts[pipeline.worker_id] -= 1
        return dict(+counts)
