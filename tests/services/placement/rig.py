"""What tests of placement say: requests, and what workers report of theirs and of their prefixes."""

from shared.blocks import HASH_BYTES
from shared.messages.commands import PlacementItem
from shared.messages.plans import EndedSequence, WorkerStepped
from shared.messages.prefixes import PrefixChain, WorkerPrefixes
from shared.messages.reports import SequenceReport, SequenceState, WorkerReported
from tests.shared.messages.builders import ref, sequence_report, worker_report

BLOCK = 16


def item(
    request: str,
    size: int = 10,
    limit: int | None = None,
    attempt: int = 1,
    prefixes: tuple[PrefixChain, ...] = (),
    waited_s: float = 0.0,
) -> PlacementItem:
    limit_tokens = size if limit is None else limit
    return PlacementItem(
        ref=ref(request, attempt),
        size_tokens=size,
        limit_tokens=limit_tokens,
        prefixes=prefixes,
        waited_s=waited_s,
    )


def report(
    worker: str,
    *,
    total: int = 64,
    free: int | None = None,
    sequences: tuple[SequenceReport, ...] = (),
    seq: int = 1,
    incarnation: int = 1,
    context: int | None = None,
    stepped_seq: int = 0,
) -> WorkerReported:
    used = sum(s.allocated_blocks for s in sequences)
    return worker_report(
        worker,
        incarnation=incarnation,
        seq=seq,
        stepped_seq=stepped_seq,
        block_tokens=BLOCK,
        max_context_tokens=total * BLOCK if context is None else context,
        total_blocks=total,
        free_blocks=total - used if free is None else free,
        sequences=sequences,
    )


def listed(
    request: str,
    *,
    prompt: int = 10,
    blocks: int = 1,
    attempt: int = 1,
    state: SequenceState = SequenceState.DECODING,
) -> SequenceReport:
    return sequence_report(
        ref(request, attempt), state, prompt_tokens=prompt, computed_tokens=prompt, allocated_blocks=blocks
    )


def stepped(worker: str, seq: int, *ended: EndedSequence) -> WorkerStepped:
    return WorkerStepped(
        worker_id=worker,
        incarnation=1,
        seq=seq,
        epoch=1,
        plan_seq=1,
        steps_done=1,
        plan_over=True,
        ended=ended,
    )


def names(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(HASH_BYTES, "big") for number in numbers)


def chain(*numbers: int, block_tokens: int = 16) -> PrefixChain:
    return PrefixChain(block_tokens=block_tokens, names=names(*numbers))


def news(
    seq: int,
    *added: int,
    tiers: bytes | None = None,
    removed: tuple[int, ...] = (),
    full: bool = False,
    incarnation: int = 1,
) -> WorkerPrefixes:
    return WorkerPrefixes(
        worker_id="w0",
        incarnation=incarnation,
        seq=seq,
        added=names(*added),
        tiers=bytes(len(added)) if tiers is None else tiers,
        removed=names(*removed),
        full=full,
    )
