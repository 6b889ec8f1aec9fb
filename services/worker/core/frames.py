"""Token frames: one per gateway after each step. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.worker.core.sequence import HeldSequence
from shared.messages.tokens import FetchedTokens, TokenDelta, TokenFrame, TokenLogprobs

MOST_LOGPROBS = 65_536
"""Maximum number of log-probabilities in a delta, at 16 bytes each well below a message's limit."""


@dataclass(frozen=True, slots=True)
class AddressedFrame:
    """A frame and its gateway."""

    gateway_id: str
    frame: TokenFrame


def delta_from(sequence: HeldSequence, first_index: int, proof: bytes = b"") -> TokenDelta:
    """Return the answer from `first_index` on, with the end reason if the delta reaches the end. The delta is
    cut where its log-probabilities get too large, and where tokens of an earlier worker meet our own. The
    next heartbeat shows that there is more."""
    ref = sequence.ref
    if sequence.sampling.top_logprobs is None and first_index == sequence.generated_tokens - 1 >= 0:
        return TokenDelta(
            ref.request_id,
            ref.choice,
            ref.attempt,
            first_index,
            (sequence.tokens[-1],),
            sequence.finish_reason,
            sequence.cached_tokens,
            proof=proof,
        )
    start = sequence.prompt_tokens + max(0, min(first_index, sequence.generated_tokens))
    end = len(sequence.tokens)
    measured = end - len(sequence.logprobs)
    logprobs: Sequence[TokenLogprobs] = ()
    if start < measured:
        end = measured
    else:
        end = min(end, start + MOST_LOGPROBS // (1 + (sequence.sampling.top_logprobs or 0)))
        logprobs = sequence.logprobs[start - measured : end - measured]
    return TokenDelta(
        request_id=ref.request_id,
        choice=ref.choice,
        attempt=ref.attempt,
        first_index=start - sequence.prompt_tokens,
        tokens=tuple(sequence.tokens[start:end]),
        finish_reason=sequence.finish_reason if end == len(sequence.tokens) else None,
        cached_tokens=sequence.cached_tokens,
        logprobs=tuple(logprobs),
        proof=proof,
    )


def assemble(
    worker_id: str, incarnation: int, changed: Iterable[tuple[HeldSequence, int]]
) -> tuple[AddressedFrame, ...]:
    """Return one frame per gateway from pairs (sequence, index of its first new token)."""
    by_gateway: dict[str, list[TokenDelta]] = {}
    for sequence, first_index in changed:
        delta = delta_from(sequence, first_index, sequence.take_proof())
        by_gateway.setdefault(sequence.gateway_id, []).append(delta)
    return tuple(
        AddressedFrame(name, TokenFrame(worker_id=worker_id, incarnation=incarnation, deltas=tuple(deltas)))
        for name, deltas in by_gateway.items()
    )


def fetched(sequence: HeldSequence | None, first_index: int) -> FetchedTokens:
    """Return the answer to a gateway that missed a frame."""
    delta = None if sequence is None else delta_from(sequence, first_index, sequence.proof)
    return FetchedTokens(delta=delta)
