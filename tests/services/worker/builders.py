"""Short ways to write the messages that tests of the worker's cores are full of."""

from services.worker.core.sequences import SequenceLimits
from shared.messages.plans import BatchPlan, Decode, Preemption, PrefillChunk
from shared.messages.sequence import Sampling, SequenceRef, SequenceSpec, pack_tokens

BLOCK_TOKENS = 4
LIMITS = SequenceLimits(max_context_tokens=64, vocabulary=100, end_retention_s=60.0, gateway_timeout_s=10.0)


def ref(request_id: str = "r", attempt: int = 1, choice: int = 0) -> SequenceRef:
    return SequenceRef(request_id=request_id, choice=choice, attempt=attempt)


def spec(
    sequence: SequenceRef,
    prompt: list[int],
    *,
    generated: list[int] | None = None,
    max_tokens: int = 32,
    end_token_ids: tuple[int, ...] = (),
    gateway_id: str = "gateway-0",
    gateway_incarnation: int = 1,
    top_logprobs: int | None = None,
    cache_salt: bytes = b"",
    rehearsal: bool = False,
) -> SequenceSpec:
    return SequenceSpec(
        ref=sequence,
        gateway_id=gateway_id,
        gateway_incarnation=gateway_incarnation,
        prompt=pack_tokens(prompt),
        generated=pack_tokens(generated or []),
        sampling=Sampling(
            seed=1,
            max_tokens=max_tokens,
            temperature=0.0,
            end_token_ids=end_token_ids,
            top_logprobs=top_logprobs,
        ),
        cache_salt=cache_salt,
        rehearsal=rehearsal,
    )


def prefill(sequence: SequenceRef, first: int, end: int, blocks: int | None = None) -> PrefillChunk:
    """Allocates what the chunk needs unless told otherwise."""
    needed = -(-end // BLOCK_TOKENS) if blocks is None else blocks
    return PrefillChunk(ref=sequence, first_token=first, end_token=end, allocated_blocks=needed)


def decode(sequence: SequenceRef, blocks: int) -> Decode:
    return Decode(ref=sequence, allocated_blocks=blocks)


def plan(
    seq: int,
    *,
    epoch: int = 1,
    steps: int = 1,
    supersedes: bool = False,
    valid_for_s: float = 5.0,
    drops: tuple[SequenceRef, ...] = (),
    preempt: tuple[SequenceRef, ...] = (),
    starts: tuple[SequenceSpec, ...] = (),
    prefills: tuple[PrefillChunk, ...] = (),
    decodes: tuple[Decode, ...] = (),
) -> BatchPlan:
    return BatchPlan(
        epoch=epoch,
        seq=seq,
        steps=steps,
        supersedes=supersedes,
        valid_for_s=valid_for_s,
        drops=drops,
        preemptions=tuple(Preemption(ref=sequence) for sequence in preempt),
        starts=starts,
        prefills=prefills,
        decodes=decodes,
    )
