"""Token frames: one per gateway after each step. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

from services.worker.core.decodes import DecodeBatch
from services.worker.core.sequence import HeldSequence
from shared.messages.tokens import FetchedTokens, TokenDelta, TokenFrame, TokenLogprobs

MOST_LOGPROBS = 65_536
"""Maximum number of log-probabilities in a delta, at 16 bytes each well below a message's limit."""
NONE: Mapping[str, list[TokenDelta]] = {}


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


def decoded(batch: DecodeBatch, *, has_ends: bool) -> dict[str, list[TokenDelta]]:
    """Return the new tokens of a committed batch by gateway; `has_ends`: sequences may have ended."""
    group, none = batch.group, repeat(None)
    requests, choices, attempts, cached = group.names
    index = (batch.first + 1 - group.prompts).tolist()
    ends = [sequence.finish_reason for sequence in group.sequences] if has_ends else none
    told = zip(batch.told, strict=True)
    deltas = list(map(TokenDelta, requests, choices, attempts, index, told, ends, cached))
    if len(group.gateways) == 1:
        return dict.fromkeys(group.gateways, deltas)
    return {name: [deltas[row] for row in rows] for name, rows in group.gateways.items()}


def assemble(
    worker_id: str,
    incarnation: int,
    changed: Iterable[tuple[HeldSequence, int]],
    decoded: Mapping[str, list[TokenDelta]] = NONE,
) -> tuple[AddressedFrame, ...]:
    """Return one frame per gateway from pairs (sequence, index of its first new token) and from deltas."""
    by_gateway = dict(decoded)
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
