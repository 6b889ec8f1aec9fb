"""Sequences that have become too large for their worker: they get another worker, or an answer. Pure.

A worker shrinks when it lends, when Pie takes its blocks back, and when somebody who lent to it is gone. Who
holds nothing there and is too large for what is left would wait as long as that lasts. It has `wait_s` where
its worker could not even borrow enough, and else `gather_s` from its turn to borrow (`wants.py`). Then it
goes to another worker that has the room, or its gateway is told that there is none.
"""

from services.scheduler.core.effects import Effect, WantKvAtWorker
from services.scheduler.core.moves import Moves
from services.scheduler.core.roster import Roster
from services.scheduler.core.rules import OversizedRules
from services.scheduler.core.sequence import Phase, Sequence
from services.scheduler.core.worker_pipeline import Sync, WorkerPipeline
from shared.errors import ContextOverflow, InvalidRequest
from shared.messages.moves import MoveMode, SequenceMove
from shared.messages.reports import WorkerReported
from shared.messages.sequence import SequenceKey


class OversizedWatch:
    """To be asked as often as workers are told what to gather."""

    def __init__(self, roster: Roster, moves: Moves, rules: OversizedRules) -> None:
        self._roster = roster
        self._moves = moves
        self._rules = rules
        self._since_s: dict[SequenceKey, float] = {}
        """When the patience with each that is too large began."""
        self._sent_on: dict[SequenceKey, None] = {}
        """Those that were to move already."""

    def on_wants(self, wants: list[WantKvAtWorker], now_s: float) -> list[Effect]:
        """`wants`: what workers are told to gather now."""
        gathering = {want.worker_id: want.tokens for want in wants}
        before, self._since_s = self._since_s, {}
        effects: list[Effect] = []
        for sequence in list(self._roster.sequences.values()):
            pipeline = self._oversized_at(sequence)
            if pipeline is None:
                continue
            patience_s = self._patience_s(sequence, pipeline, gathering)
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
        """The pipeline at which it waits without KV, larger than all that the worker has."""
        if sequence.phase not in (Phase.PLACED, Phase.WAITING):
            return None
        pipeline = self._roster.pipelines.get(sequence.worker_id or "")
        is_oversized = (
            pipeline is not None and pipeline.sync is Sync.IN_STEP and not _holds(pipeline.report, sequence)
        )
        return pipeline if is_oversized else None

    def _patience_s(
        self, sequence: Sequence, pipeline: WorkerPipeline, gathering: dict[str, int]
    ) -> float | None:
        """None: others that are older borrow first."""
        if sequence.limit_tokens > pipeline.report.max_context_tokens:
            return self._rules.wait_s
        is_its_turn = gathering.get(pipeline.worker_id, 0) >= sequence.limit_tokens
        return self._rules.gather_s if is_its_turn else None

    def _resolve(self, sequence: Sequence, pipeline: WorkerPipeline, now_s: float) -> list[Effect]:
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
                pass  # it cannot be moved: refused below
        tokens = pipeline.report.capacity.total_blocks * pipeline.report.block_tokens
        error = ContextOverflow(
            f"{pipeline.worker_id} shrank to {tokens} tokens, and no other worker has room for the"
            f" {sequence.limit_tokens} of prompt and answer; send a shorter prompt, ask for fewer tokens, or"
            " try again when more workers run",
            param="messages",
        )
        return [self._roster.give_up(sequence, error, now_s)]


def _holds(report: WorkerReported, sequence: Sequence) -> bool:
    """Whether the worker's pool, as it is, can hold prompt and longest answer."""
    capacity = report.capacity
    lasting_blocks = capacity.total_blocks - capacity.doomed_blocks
    needed_blocks = -(-(sequence.limit_tokens - 1) // report.block_tokens)
    return needed_blocks <= lasting_blocks and sequence.limit_tokens <= report.max_context_tokens
