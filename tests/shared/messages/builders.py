"""Short ways to write messages that have many fields, where only a few matter."""

from collections.abc import Iterable
from typing import Any

import msgspec

from shared.messages.commands import CancelSequence, LengthPrediction
from shared.messages.plans import BatchPlan, Decode, Preemption, PrefillChunk
from shared.messages.reports import Capacity, SequenceReport, SequenceState, WorkerReported
from shared.messages.sequence import Sampling, SequenceRef, SequenceSpec, pack_tokens
from shared.messages.tokens import AcknowledgeEnds

_IDLE = WorkerReported(
    worker_id="worker-0",
    incarnation=1,
    seq=1,
    stepped_seq=0,
    epoch=1,
    plan_seq=0,
    model="m",
    block_tokens=16,
    max_context_tokens=160,
    capacity=Capacity(total_blocks=10, free_blocks=10),
)


def worker_report(worker_id: str = "worker-0", **fields: Any) -> WorkerReported:
    """The first heartbeat of a worker that does nothing, but for what is named. Figures of its capacity are
    named like the others: `worker_report("a", free_blocks=3, model="m")`."""
    own = {name: fields.pop(name) for name in Capacity.__struct_fields__ if name in fields}
    if own:
        fields["capacity"] = msgspec.structs.replace(_IDLE.capacity, **own)
    return msgspec.structs.replace(_IDLE, worker_id=worker_id, **fields)


def sequence_report(sequence: SequenceRef, state: SequenceState, **fields: Any) -> SequenceReport:
    """One block, ten tokens of prompt and none of them computed, but for what is named."""
    usual: dict[str, Any] = {"gateway_id": "gateway-0", "prompt_tokens": 10, "generated_tokens": 0}
    usual |= {"computed_tokens": 0, "max_tokens": 100, "allocated_blocks": 1}
    return SequenceReport(ref=sequence, state=state, **(usual | fields))


BLOCK_TOKENS = 4


def ref(request_id: str = "r", attempt: int = 1, choice: int = 0) -> SequenceRef:
    return SequenceRef(request_id=request_id, choice=choice, attempt=attempt)


def spec(
    sequence: SequenceRef,
    prompt: list[int],
    *,
    generated: Iterable[int] = (),
    max_tokens: int = 32,
    **fields: Any,
) -> SequenceSpec:
    """What is not named is as in a greedy request of the gateway's first life."""
    chosen = {name: fields.pop(name) for name in ("end_token_ids", "top_logprobs") if name in fields}
    sampling = Sampling(seed=1, max_tokens=max_tokens, temperature=0.0, **chosen)
    fields = {"gateway_id": "gateway-0", "gateway_incarnation": 1, "sampling": sampling, **fields}
    return SequenceSpec(ref=sequence, prompt=pack_tokens(prompt), generated=pack_tokens(generated), **fields)


def prefill(sequence: SequenceRef, first: int, end: int, blocks: int | None = None) -> PrefillChunk:
    """Allocates what the chunk needs unless told otherwise."""
    needed = -(-end // BLOCK_TOKENS) if blocks is None else blocks
    return PrefillChunk(ref=sequence, first_token=first, end_token=end, allocated_blocks=needed)


def decode(sequence: SequenceRef, blocks: int) -> Decode:
    return Decode(ref=sequence, allocated_blocks=blocks)


def plan(seq: int, *, steps: int = 1, preempt: tuple[SequenceRef, ...] = (), **fields: Any) -> BatchPlan:
    """Of the first epoch, and valid for five seconds."""
    preemptions = tuple(Preemption(ref=sequence) for sequence in preempt)
    fields = {"epoch": 1, "valid_for_s": 5.0, **fields}
    return BatchPlan(seq=seq, steps=steps, preemptions=preemptions, **fields)


def cancelling(sequence: SequenceRef, sender: str = "gateway-0") -> CancelSequence:
    return CancelSequence(ref=sequence, sender=sender)


def acknowledging(*refs: SequenceRef, sender: str = "gateway-0") -> AcknowledgeEnds:
    return AcknowledgeEnds(refs=refs, sender=sender)


def predicted(tokens: int) -> LengthPrediction:
    """All quantiles alike."""
    every = dict.fromkeys(("rl_tokens", "p50_tokens", "p80_tokens", "p90_tokens", "p95_tokens"), tokens)
    return LengthPrediction(**every, model_version="test-1")  # type: ignore[arg-type]
