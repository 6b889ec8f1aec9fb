"""What a gateway is told after each step: one token frame per gateway. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.worker.state import HeldSequence
from shared.messages.tokens import FetchedTokens, TokenDelta, TokenFrame


@dataclass(frozen=True, slots=True)
class AddressedFrame:
    """A frame and the gateway it goes to."""

    gateway_id: str
    frame: TokenFrame

    @property
    def ends(self) -> int:
        """How many sequences end in it."""
        return sum(delta.finish_reason is not None for delta in self.frame.deltas)


def delta_from(sequence: HeldSequence, first_index: int) -> TokenDelta:
    """The answer from `first_index` on, with the end reason when it has ended."""
    start = sequence.prompt_tokens + max(0, min(first_index, sequence.generated_tokens))
    return TokenDelta(
        request_id=sequence.ref.request_id,
        choice=sequence.ref.choice,
        attempt=sequence.ref.attempt,
        first_index=start - sequence.prompt_tokens,
        tokens=tuple(sequence.tokens[start:]),
        finish_reason=sequence.finish_reason,
    )


def assemble(
    worker_id: str, incarnation: int, changed: Iterable[tuple[HeldSequence, int]]
) -> tuple[AddressedFrame, ...]:
    """One frame per gateway from (sequence, index of its first new token)."""
    by_gateway: dict[str, list[TokenDelta]] = {}
    for sequence, first_index in changed:
        by_gateway.setdefault(sequence.gateway_id, []).append(delta_from(sequence, first_index))
    return tuple(
        AddressedFrame(name, TokenFrame(worker_id=worker_id, incarnation=incarnation, deltas=tuple(deltas)))
        for name, deltas in by_gateway.items()
    )


def fetched(sequence: HeldSequence | None, first_index: int) -> FetchedTokens:
    """Answer to a gateway that missed a frame."""
    return FetchedTokens(delta=None if sequence is None else delta_from(sequence, first_index))


def without_ends(frames: Sequence[AddressedFrame]) -> tuple[AddressedFrame, ...]:
    """The frames in which nothing ends: what arrives under the fault `fault_drop_final_frames`."""
    return tuple(frame for frame in frames if not frame.ends)
