"""Live migration: moves running sequences between workers without interrupting their readers. Pure.

The source reports its tokens; the target computes them as a sequence without a reader (rehearsal), or fetches
their blocks, repeatedly, until little is missing. Then the gateway resubmits the request under a higher
attempt, which the target runs. Until then a move may be abandoned at any time. docs/migration.md
"""

from dataclasses import dataclass
from enum import StrEnum

from services.scheduler.core.effects import AskPull, AskTokens, Effect, PublishMoved, PublishPrepared
from services.scheduler.core.roster import Roster
from services.scheduler.core.rules import MoveRules
from services.scheduler.core.sequence import HELD, Phase, Sequence
from services.scheduler.core.worker_pipeline import WorkerPipeline
from shared.errors import InvalidRequest
from shared.messages.moves import (
    BlocksPulled,
    MoveMode,
    MovePrepared,
    PullBlocks,
    SequenceMove,
    SequenceMoved,
)
from shared.messages.sequence import (
    TOKEN_BYTES,
    Sampling,
    SequenceKey,
    SequenceRef,
    SequenceSpec,
    pack_tokens,
)

_MOST_NAME_CHARS = 160
"""Longest part of a request id in a rehearsal's name."""


class MoveStage(StrEnum):
    ASKING = "asking"
    PULLING = "pulling"
    REHEARSING = "rehearsing"
    SWITCHING = "switching"


@dataclass(slots=True, eq=False)
class Move:
    """Progress and cost of one move."""

    ref: SequenceRef
    """The attempt that moves."""
    source: str
    target: str
    mode: MoveMode
    began_s: float
    deadline_s: float
    why: str = ""
    stage: MoveStage = MoveStage.ASKING
    rounds: int = 0
    """Number of rehearsals or fetches."""
    rehearsal: SequenceRef | None = None
    rehearsed_tokens: int = 0
    """Tokens that the target has, or is receiving."""
    moved_bytes: int = 0
    late_bytes: int = 0
    late_s: float = 0.0
    fallback: str = ""
    """Why the move no longer fetches KV."""
    prepared_s: float = 0.0
    is_open: bool = False
    """Whether the fetch follows a prompt whose prefill is not complete, chunk by chunk."""
    ask_at_s: float | None = None
    """When to ask the source again, while its prompt is being computed."""

    def note_pull(self, pulled: BlocksPulled) -> bool:
        """Record a fetch. Return False if it brought no progress."""
        is_ahead = pulled.held_tokens > self.rehearsed_tokens
        self.rehearsed_tokens = max(self.rehearsed_tokens, pulled.held_tokens)
        self.moved_bytes += pulled.fetched_bytes
        if not self.is_open:
            self.late_bytes += pulled.fetched_bytes
            self.late_s += pulled.took_s
        return is_ahead

    def fall_back(self, reason: str) -> None:
        """Continue by tokens; the target still reuses what it fetched."""
        self.mode, self.fallback = MoveMode.TOKENS, reason
        self.rehearsed_tokens = self.rounds = 0

    def over(self, reason: str, now_s: float) -> SequenceMoved:
        """Return the final report; a non-empty `reason` means failure."""
        prepared_s = self.prepared_s if self.stage is MoveStage.SWITCHING else now_s
        return SequenceMoved(
            ref=self.ref,
            source=self.source,
            target=self.target,
            mode=self.mode,
            why=self.why,
            reason=reason,
            rounds=self.rounds,
            rehearsed_tokens=self.rehearsed_tokens,
            moved_bytes=self.moved_bytes,
            late_bytes=self.late_bytes,
            late_s=self.late_s,
            fallback=self.fallback,
            prepare_s=prepared_s - self.began_s,
            switch_s=now_s - prepared_s,
        )


_FOLLOW_S = 0.01
"""Seconds between two fetches that follow a prefill."""
_FOLLOWS_S = 1.0
"""Seconds to wait for a resubmission if the source dies before the switch."""


class Moves:
    """All moves, at most one per sequence. Call `advance` after every event while there are any."""

    def __init__(self, roster: Roster, rules: MoveRules) -> None:
        self._roster = roster
        self._rules = rules
        self.by_key: dict[SequenceKey, Move] = {}
        self._numbers = 0
        self.done = 0
        self.failed = 0

    def begin(self, order: SequenceMove, now_s: float) -> list[Effect]:
        """Begin a move. Raises InvalidRequest with the reason if it is impossible."""
        sequence = self._roster.find(order.ref)
        refusal = self._refusal(order, sequence)
        if refusal or sequence is None or sequence.worker_id is None:
            raise InvalidRequest(refusal, param="moves")
        deadline_s = now_s + self._rules.deadline_s
        move = Move(order.ref, sequence.worker_id, order.target, order.mode, now_s, deadline_s, order.why)
        self.by_key[sequence.key] = move
        target = self._roster.pipelines[move.target]
        if not target.report.caches_prefixes:  # it would keep nothing: the reader waits for a whole prefill
            move.mode = MoveMode.TOKENS
            return self._switch(move, sequence.prompt_tokens + sequence.generated_tokens, now_s)
        if move.mode is MoveMode.KV and (obstacle := self._obstacle(move)):
            move.fall_back(obstacle)
        return [AskTokens(move.source, move.ref)]

    def on_tokens(self, ref: SequenceRef, tokens: tuple[int, ...] | None, now_s: float) -> list[Effect]:
        """Apply the source's tokens of the answer; None if it did not reply."""
        move = self.by_key.get(ref.key)
        if move is None or move.ref != ref or move.stage is not MoveStage.ASKING:
            return []
        move.ask_at_s = None
        sequence = self._roster.find(ref)
        if tokens is None or sequence is None or sequence.spec is None:
            return self._end(move, "the source did not say which tokens it has", now_s)
        size_tokens = sequence.prompt_tokens + len(tokens)
        if self._is_close(move, size_tokens) or move.rounds >= self._rules.most_rounds:
            return self._switch(move, size_tokens, now_s)
        if move.mode is MoveMode.KV:
            return self._pull(move, sequence.spec, tokens, now_s, is_open=not tokens)
        return self._rehearse(move, sequence.spec, tokens, now_s)

    def on_pulled(self, ref: SequenceRef, pulled: BlocksPulled | None, now_s: float) -> list[Effect]:
        """Apply the target's fetch; None if it fetched nothing."""
        move = self.by_key.get(ref.key)
        if move is None or move.ref != ref or move.stage is not MoveStage.PULLING:
            return []
        is_open = move.is_open
        if pulled is None or (not move.note_pull(pulled) and not is_open):
            move.fall_back("no more could be fetched" if pulled else "the blocks could not be fetched")
        move.is_open, move.stage = False, MoveStage.ASKING
        if is_open and pulled is not None:
            move.ask_at_s = now_s + _FOLLOW_S
            return []
        return [AskTokens(move.source, move.ref)]

    def advance(self, now_s: float) -> list[Effect]:
        """Advance or end moves after changes of their sequences and workers."""
        return [effect for move in list(self.by_key.values()) for effect in self._advance(move, now_s)]

    def pipeline_for(self, sequence: Sequence) -> WorkerPipeline | None:
        """Return the move's target for a higher attempt, even if the source died first."""
        move = self.by_key.get(sequence.key)
        if move is None or sequence.ref.attempt <= move.ref.attempt:
            return None
        return self._roster.in_step(move.target) if sequence in self._roster.backlog else None

    def describe(self) -> dict[str, int]:
        """Return counts, for people."""
        return {"moving": len(self.by_key), "moved": self.done, "moves_failed": self.failed}

    def check_integrity(self) -> None:
        """Raises AssertionError when a move is inconsistent."""
        for key, move in self.by_key.items():
            assert move.ref.key == key and move.source != move.target
            assert (move.rehearsal is not None) == (move.stage is MoveStage.REHEARSING)
            assert move.rounds <= self._rules.most_rounds

    def _refusal(self, order: SequenceMove, sequence: Sequence | None) -> str:
        """Return why the move is impossible, or ""."""
        pipeline = self._roster.in_step(order.target)
        if sequence is None or sequence.phase not in HELD:
            return f"{order.ref} does not run"
        if sequence.key in self.by_key:
            return f"{order.ref} moves already"
        if sequence.spec is None or sequence.spec.rehearsal:
            return f"{order.ref} is not known well enough to be moved"
        if sequence.spec.sampling.top_logprobs is not None:
            return f"{order.ref} gives log-probabilities, which do not travel"
        if len(self.by_key) >= self._rules.most_at_once:
            return f"{len(self.by_key)} sequences are on the move already"
        if pipeline is None or order.target == sequence.worker_id:
            return f"{order.target} cannot take it"
        if sequence.limit_tokens > pipeline.report.max_context_tokens:
            return f"{order.ref} may grow larger than {order.target}"
        if sequence.limit_tokens * TOKEN_BYTES > self._roster.rules.max_start_bytes:
            return f"{order.ref} may grow larger than one message"
        return ""

    def _obstacle(self, move: Move) -> str:
        """Return why the target cannot fetch the source's blocks, or ""."""
        pipelines = self._roster.pipelines
        source, target = pipelines[move.source].report, pipelines[move.target].report
        if source.fingerprint != target.fingerprint:
            return "their blocks are of different kinds"
        if not (source.kv_block_bytes and target.kv_block_bytes):
            return "no bulk plane leads there"
        return ""

    def _is_close(self, move: Move, size_tokens: int) -> bool:
        """Return whether the switch can compute the missing tokens."""
        missing_tokens = size_tokens - move.rehearsed_tokens
        if move.mode is MoveMode.KV:
            pipeline = self._roster.pipelines.get(move.target)
            return move.rounds > 0 and pipeline is not None and missing_tokens <= pipeline.report.block_tokens
        return move.rounds > 0 and missing_tokens <= self._rules.last_tokens

    def _pull(
        self, move: Move, spec: SequenceSpec, tokens: tuple[int, ...], now_s: float, *, is_open: bool
    ) -> list[Effect]:
        """Order a fetch. `is_open`: the prompt is not complete, so the fetch is not a round."""
        target, source = self._roster.pipelines.get(move.target), self._roster.pipelines.get(move.source)
        count = len(spec.prompt) // TOKEN_BYTES + len(tokens)
        if target is None or source is None or not self._fits(target, count, move):
            return self._end(move, f"{move.target} has no room", now_s)
        move.stage, move.is_open = MoveStage.PULLING, is_open
        move.rounds += not is_open
        order = PullBlocks(
            source=move.source,
            source_incarnation=source.report.incarnation,
            tokens=(spec.prompt + pack_tokens(tokens))[:-TOKEN_BYTES],  # the newest has no KV yet
            cache_salt=spec.cache_salt,
            valid_for_s=move.deadline_s - now_s,
        )
        return [AskPull(move.target, move.ref, order)]

    def _rehearse(
        self, move: Move, spec: SequenceSpec, tokens: tuple[int, ...], now_s: float
    ) -> list[Effect]:
        """Let the target compute prompt and answer so far as a sequence of its own, with a unique name."""
        pipeline = self._roster.in_step(move.target)
        count = len(spec.prompt) // TOKEN_BYTES + len(tokens)
        if pipeline is None or not self._fits(pipeline, count, move):
            return self._end(move, f"{move.target} has no room", now_s)
        self._numbers += 1
        name = f"{move.ref.request_id[:_MOST_NAME_CHARS]}~{pipeline.epoch}.{self._numbers}"
        rehearsal = SequenceSpec(
            ref=SequenceRef(request_id=name, choice=move.ref.choice, attempt=1),
            gateway_id=spec.gateway_id,
            gateway_incarnation=spec.gateway_incarnation,
            prompt=spec.prompt + pack_tokens(tokens),
            sampling=Sampling(seed=0, max_tokens=1, temperature=0.0),
            waited_s=0.0,
            cache_salt=spec.cache_salt,
            adapter=spec.adapter,
            priority=spec.priority,
            tenant=spec.tenant,
            rehearsal=True,
        )
        sequence = Sequence.from_spec(rehearsal, now_s)
        self._roster.add(sequence)
        self._roster.place(sequence, pipeline, now_s)
        move.stage, move.rehearsal = MoveStage.REHEARSING, sequence.ref
        move.rounds += 1
        move.rehearsed_tokens = count
        return []

    def _fits(self, pipeline: WorkerPipeline, tokens: int, move: Move) -> bool:
        """Return whether the target has room beside its own sequences, unstarted ones, and other moves."""
        size = pipeline.report.block_tokens
        owed = [
            sequence.prompt_tokens + sequence.generated_tokens
            for sequence in self._roster.of_worker(pipeline.worker_id)
            if sequence.phase in (Phase.PLACED, Phase.WAITING)
        ]
        owed += [
            other.rehearsed_tokens
            for other in self.by_key.values()
            if other is not move and other.target == pipeline.worker_id
        ]
        blocks = sum(-(-count // size) for count in (*owed, tokens)) + 1
        report = pipeline.report
        return blocks <= report.capacity.plannable_blocks and tokens < report.max_context_tokens

    def _advance(self, move: Move, now_s: float) -> list[Effect]:
        sequence = self._roster.sequences.get(move.ref.key)
        is_resubmitted = sequence is not None and sequence.ref.attempt > move.ref.attempt
        if move.stage is MoveStage.SWITCHING and sequence is not None and is_resubmitted:
            if sequence.worker_id == move.target and sequence.confirmed:
                return self._end(move, "", now_s)
            if sequence.worker_id not in (None, move.target):
                return self._end(move, "it was placed elsewhere", now_s)
        if sequence is None or is_resubmitted or sequence.worker_id != move.source:
            return self._without_source(move, sequence, now_s)
        if now_s > move.deadline_s:
            return self._end(move, f"not over after {self._rules.deadline_s:g} s, {move.stage}", now_s)
        if move.target not in self._roster.pipelines:
            return self._end(move, f"{move.target} is gone", now_s)
        if move.ask_at_s is not None and now_s >= move.ask_at_s:
            move.ask_at_s = None
            return [AskTokens(move.source, move.ref)]
        if move.rehearsal is None or self._roster.find(move.rehearsal) is not None:
            return []
        has_ended = self._roster.ended.get(move.rehearsal.key, now_s) is not None
        move.rehearsal, move.stage = None, MoveStage.ASKING
        if not has_ended:
            return self._end(move, f"{move.target} did not rehearse it", now_s)
        return [AskTokens(move.source, move.ref)]

    def _without_source(self, move: Move, sequence: Sequence | None, now_s: float) -> list[Effect]:
        """Handle a sequence that left the source: it ended, its worker died, or the switch is under way."""
        if move.stage is MoveStage.SWITCHING:
            return self._end(move, "it did not arrive", now_s) if now_s > move.deadline_s else []
        if sequence is None and self._roster.ended.get(move.ref.key, now_s) is not None:
            return self._end(move, "it ended before", now_s)
        effects = self._stop_rehearsal(move, now_s)
        move.stage, move.prepared_s, move.deadline_s = MoveStage.SWITCHING, now_s, now_s + _FOLLOWS_S
        return effects

    def _switch(self, move: Move, size_tokens: int, now_s: float) -> list[Effect]:
        """Tell the gateway to switch, if the target has room for the sequence's tokens."""
        pipeline = self._roster.pipelines.get(move.target)
        if pipeline is None or not self._fits(pipeline, size_tokens, move):
            return self._end(move, f"{move.target} has no room any more", now_s)
        move.stage, move.prepared_s = MoveStage.SWITCHING, now_s
        move.deadline_s = now_s + self._rules.switch_s
        open_tokens = self._rules.open_tokens if move.rounds else 0
        return [PublishPrepared(MovePrepared(ref=move.ref, target=move.target, open_tokens=open_tokens))]

    def _stop_rehearsal(self, move: Move, now_s: float) -> list[Effect]:
        rehearsal = None if move.rehearsal is None else self._roster.find(move.rehearsal)
        move.rehearsal = None
        return [] if rehearsal is None else [self._roster.leave(rehearsal, Phase.CANCELLED, now_s)]

    def _end(self, move: Move, reason: str, now_s: float) -> list[Effect]:
        effects = self._stop_rehearsal(move, now_s)
        del self.by_key[move.ref.key]
        self.done += not reason
        self.failed += bool(reason)
        return [*effects, PublishMoved(move.over(reason, now_s))]
