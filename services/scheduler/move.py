"""One migration under way: its stages, and what is sent about it. No decisions. docs/migration.md."""

from dataclasses import dataclass
from enum import StrEnum

from services.scheduler.state import Sequence
from shared.messages.moves import BlocksPulled, MoveMode, PullBlocks, SequenceMoved
from shared.messages.sequence import TOKEN_BYTES, Sampling, SequenceRef, SequenceSpec, pack_tokens

_MOST_NAME_CHARS = 160
"""Of a request's id, with room for the number of a rehearsal."""


class Stage(StrEnum):
    ASKING = "asking"
    PULLING = "pulling"
    REHEARSING = "rehearsing"
    SWITCHING = "switching"


@dataclass(slots=True, eq=False)
class Move:
    """One of them."""

    ref: SequenceRef
    """The attempt that moves."""
    source: str
    target: str
    mode: MoveMode
    began_s: float
    deadline_s: float
    stage: Stage = Stage.ASKING
    rounds: int = 0
    """Rehearsals, or times that blocks were fetched."""
    rehearsal: SequenceRef | None = None
    rehearsed_tokens: int = 0
    """That the target has, in blocks or on their way there."""
    moved_bytes: int = 0
    fallback: str = ""
    """Why KV is not fetched any more."""
    prepared_s: float = 0.0

    def note_pull(self, pulled: BlocksPulled) -> bool:
        """What the target fetched. False when that was no step ahead."""
        is_ahead = pulled.held_tokens > self.rehearsed_tokens
        self.rehearsed_tokens = max(self.rehearsed_tokens, pulled.held_tokens)
        self.moved_bytes += pulled.fetched_bytes
        return is_ahead

    def fall_back(self, reason: str) -> None:
        """By tokens from now on; what was fetched is found there."""
        self.mode, self.fallback = MoveMode.TOKENS, reason
        self.rehearsed_tokens = self.rounds = 0

    def over(self, reason: str, now_s: float) -> SequenceMoved:
        """What is said about it at its end; it failed when there is a `reason`."""
        prepared_s = self.prepared_s if self.stage is Stage.SWITCHING else now_s
        return SequenceMoved(
            ref=self.ref,
            source=self.source,
            target=self.target,
            mode=self.mode,
            reason=reason,
            rounds=self.rounds,
            rehearsed_tokens=self.rehearsed_tokens,
            moved_bytes=self.moved_bytes,
            fallback=self.fallback,
            prepare_s=prepared_s - self.began_s,
            switch_s=now_s - prepared_s,
        )


def rehearsal_of(move: Move, spec: SequenceSpec, tokens: tuple[int, ...], number: int) -> SequenceSpec:
    """Prompt and answer so far, as a sequence of its own."""
    ref = SequenceRef(
        request_id=f"{move.ref.request_id[:_MOST_NAME_CHARS]}~{number}", choice=move.ref.choice, attempt=1
    )
    return SequenceSpec(
        ref=ref,
        gateway_id=spec.gateway_id,
        gateway_incarnation=spec.gateway_incarnation,
        prompt=spec.prompt + pack_tokens(tokens),
        sampling=Sampling(seed=0, max_tokens=1, temperature=0.0),
        waited_s=0.0,
        cache_salt=spec.cache_salt,
        rehearsal=True,
    )


def pull_of(
    move: Move, spec: SequenceSpec, tokens: tuple[int, ...], incarnation: int, valid_for_s: float
) -> PullBlocks:
    """All but the newest token, which has no KV yet."""
    packed = spec.prompt + pack_tokens(tokens)
    return PullBlocks(
        source=move.source,
        source_incarnation=incarnation,
        tokens=packed[:-TOKEN_BYTES],
        cache_salt=spec.cache_salt,
        valid_for_s=valid_for_s,
    )


def owed_tokens(sequence: Sequence) -> int:
    """What has to be computed of it before it goes on."""
    return sequence.prompt_tokens + sequence.generated_tokens
