"""Watches workers that run out of memory and picks a rung of the relief ladder (`policy/relief.py`). Pure.

It starts migrations, and limits borrowing in advance where another rung is cheaper. The other rungs stay with
the worker and the batching policy. Source: algorithms.md §7.
"""

from collections.abc import Iterator

from services.scheduler.core.effects import Effect, NoteRelief, WantKvAtWorker
from services.scheduler.core.moves import Moves
from services.scheduler.core.roster import Roster
from services.scheduler.core.rules import ReliefRules
from services.scheduler.core.sequence import Phase, Sequence
from services.scheduler.core.worker_pipeline import Sync, WorkerPipeline, speeds_of
from services.scheduler.policy.relief import BY_KV, MemoryPressure, Rung, Victim, next_relief
from shared.errors import InvalidRequest
from shared.messages.moves import MoveMode, SequenceMove
from shared.messages.reports import SequenceReport, SequenceState


class PressureWatch:
    """Decides for each worker that runs short, at most every `interval_s`."""

    def __init__(self, roster: Roster, moves: Moves, rules: ReliefRules) -> None:
        self._roster = roster
        self._moves = moves
        self._rules = rules
        self._next_s: dict[str, float] = {}
        self._thrifty_until_s: dict[str, float] = {}
        """By worker: time until which it must not borrow in advance."""
        self._gathering: set[str] = set()
        """Workers last told to gather KV for a long sequence."""
        self.decisions: dict[str, int] = {}

    def on_tick(self, now_s: float) -> list[Effect]:
        """Decide for every worker that is due."""
        effects: list[Effect] = []
        if not self._rules.enabled:
            return []
        for pipeline in self._roster.pipelines.values():
            if pipeline.short_blocks > 0 and now_s >= self._next_s.get(pipeline.worker_id, now_s):
                effects += self._relieve(pipeline, now_s)
        return effects

    def with_limits(self, wants: list[WantKvAtWorker], now_s: float) -> list[WantKvAtWorker]:
        """Return `wants` plus limits on borrowing in advance. A worker that need no longer gather is told so,
        to release what it gathered."""
        self._thrifty_until_s = {
            worker_id: until_s
            for worker_id, until_s in self._thrifty_until_s.items()
            if now_s < until_s and worker_id in self._roster.pipelines
        }
        nobody = self._rules.enabled and Rung.BORROW in self._rules.switched_off
        thrifty = self._roster.pipelines.keys() if nobody else self._thrifty_until_s.keys()
        done = [worker_id for worker_id in sorted(self._gathering) if worker_id in self._roster.pipelines]
        told = {worker_id: WantKvAtWorker(worker_id, 0) for worker_id in (*done, *thrifty)}
        told |= {want.worker_id: want for want in wants}
        self._gathering = {want.worker_id for want in wants}
        return [WantKvAtWorker(name, want.tokens, name not in thrifty) for name, want in told.items()]

    def _relieve(self, pipeline: WorkerPipeline, now_s: float) -> list[Effect]:
        if pipeline.sync is not Sync.IN_STEP or len(pipeline.growing) < 2:
            return []
        self._next_s[pipeline.worker_id] = now_s + self._rules.interval_s
        target = self._roomiest(pipeline)
        victim = self._victim(pipeline)
        relief = next_relief(self._pressure(pipeline, target, victim), self._rules.switched_off)
        rung = "wait" if relief.chosen is None else relief.chosen.rung
        self.decisions[rung] = self.decisions.get(rung, 0) + 1
        has_offer = any(offer.rung == Rung.BORROW for offer in relief.offers)
        if has_offer and relief.chosen is not None and relief.chosen.rung != Rung.BORROW:
            self._thrifty_until_s[pipeline.worker_id] = now_s + self._rules.hold_s
        effects: list[Effect] = [NoteRelief(pipeline.worker_id, relief)]
        chosen = relief.chosen
        if chosen and chosen.rung == Rung.MIGRATE and target is not None and victim is not None:
            mode = MoveMode.KV if chosen.reason == BY_KV else MoveMode.TOKENS
            why = "its worker runs out of memory"
            order = SequenceMove(ref=victim[0].ref, target=target.worker_id, mode=mode, why=why)
            try:
                effects += self._moves.begin(order, now_s)
            except InvalidRequest:
                self.decisions["refused"] = self.decisions.get("refused", 0) + 1
        return effects

    def _pressure(
        self,
        pipeline: WorkerPipeline,
        target: WorkerPipeline | None,
        victim: tuple[Sequence, SequenceReport] | None,
    ) -> MemoryPressure:
        report = pipeline.report
        ends = sorted(self._ends_within(pipeline.growing))
        within, freed = ends[0] if ends else (None, 0)
        return MemoryPressure(
            needed_blocks=pipeline.short_blocks,
            block_tokens=report.block_tokens,
            running=len(pipeline.growing),
            horizon_steps=self._rules.horizon_steps if within is None else within,
            speeds=speeds_of(report, None if target is None else target.report),
            host_tier_blocks=report.swap_room_blocks,
            growable_blocks=0 if report.expand_stall_s is None else report.capacity.growable_blocks,
            lendable_blocks=0 if target is None else target.report.capacity.loanable_blocks,
            room_blocks=0 if target is None else self._room(target),
            is_linked=target is not None
            and report.kv_block_bytes > 0
            and report.fingerprint == target.report.fingerprint,
            victim=None if victim is None else self._as_victim(victim[1]),
            frees_within_steps=within,
            frees_blocks=freed,
        )

    def _ends_within(self, decoding: list[SequenceReport]) -> Iterator[tuple[int, int]]:
        """Yield steps to the end and blocks of each sequence with a prediction."""
        for listed in decoding:
            sequence = self._roster.find(listed.ref)
            if sequence is not None and sequence.prediction is not None:
                yield max(1, self._remaining_tokens(listed)), listed.allocated_blocks

    def _remaining_tokens(self, listed: SequenceReport) -> int:
        """Return the predicted rest, or the limit; past its prediction a sequence counts as half done."""
        most = listed.max_tokens - listed.generated_tokens
        sequence = self._roster.find(listed.ref)
        if sequence is None or sequence.prediction is None:
            return most
        left = sequence.prediction.rl_tokens - listed.generated_tokens
        return min(most, left if left > 0 else listed.generated_tokens)

    def _victim(self, pipeline: WorkerPipeline) -> tuple[Sequence, SequenceReport] | None:
        """Return the movable sequence of the highest priority number that came last."""
        found = [
            (sequence, listed)
            for listed in pipeline.report.sequences
            if (sequence := self._roster.find(listed.ref)) is not None
            and sequence.phase is Phase.DECODING
            and sequence.worker_id == pipeline.worker_id
            and sequence.key not in self._moves.by_key
        ]
        return max(found, key=lambda pair: (pair[0].level, pair[0].order), default=None)

    def _as_victim(self, listed: SequenceReport) -> Victim:
        tokens = listed.prompt_tokens + listed.generated_tokens
        return Victim(listed.allocated_blocks, tokens, self._remaining_tokens(listed))

    def _roomiest(self, pipeline: WorkerPipeline) -> WorkerPipeline | None:
        others = self._roster.others_in_step(pipeline)
        return max(others, key=lambda other: (self._room(other), other.worker_id), default=None)

    def _room(self, pipeline: WorkerPipeline) -> int:
        """Return the blocks beside the predicted growth; 0 if any sequence waits for blocks."""
        here = self._roster.of_worker(pipeline.worker_id)
        if any(sequence.phase in (Phase.PLACED, Phase.WAITING) for sequence in here):
            return 0
        size = pipeline.report.block_tokens
        running = [one for one in pipeline.report.sequences if one.state is not SequenceState.ENDED]
        growth = sum(self._remaining_tokens(listed) // size + 1 for listed in running)
        return max(0, pipeline.report.capacity.plannable_blocks - growth)
