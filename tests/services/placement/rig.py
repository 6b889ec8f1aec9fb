"""What tests of placement say: requests, and what workers report of theirs and of their prefixes."""

from typing import Any

from shared.blocks import HASH_BYTES
from shared.messages.commands import PlacementItem
from shared.messages.plans import EndedSequence, WorkerStepped
from shared.messages.prefixes import PrefixChain, WorkerPrefixes
from shared.messages.reports import SequenceReport, SequenceState, WorkerReported
from tests.shared.messages.builders import ref, sequence_report, worker_report

BLOCK = 16
DECODING = SequenceState.DECODING


def item(
    request: str, size: int = 10, limit: int | None = None, attempt: int = 1, **more: Any
) -> PlacementItem:
    limit_tokens = size if limit is None else limit
    return PlacementItem(ref=ref(request, attempt), size_tokens=size, limit_tokens=limit_tokens, **more)


def report(
    worker: str,
    *,
    total: int = 64,
    free: int | None = None,
    sequences: tuple[SequenceReport, ...] = (),
    context: int | None = None,
    **fields: Any,
) -> WorkerReported:
    used = sum(s.allocated_blocks for s in sequences)
    fields |= {"max_context_tokens": total * BLOCK if context is None else context, "block_tokens": BLOCK}
    fields |= {"total_blocks": total, "free_blocks": total - used if free is None else free}
    return worker_report(worker, sequences=sequences, **fields)


def listed(
    request: str, *, prompt: int = 10, blocks: int = 1, attempt: int = 1, state: SequenceState = DECODING
) -> SequenceReport:
    counts = {"prompt_tokens": prompt, "computed_tokens": prompt, "allocated_blocks": blocks}
    return sequence_report(ref(request, attempt), state, **counts)


def stepped(worker: str, seq: int, *ended: EndedSequence) -> WorkerStepped:
    plan: dict[str, Any] = {"epoch": 1, "plan_seq": 1, "steps_done": 1, "plan_over": True}
    return WorkerStepped(worker_id=worker, incarnation=1, seq=seq, ended=ended, **plan)


def names(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(HASH_BYTES, "big") for number in numbers)


def chain(*numbers: int, block_tokens: int = 16) -> PrefixChain:
    return PrefixChain(block_tokens=block_tokens, names=names(*numbers))


def news(
    seq: int, *added: int, tiers: bytes | None = None, removed: tuple[int, ...] = (), **fields: Any
) -> WorkerPrefixes:
    """Of worker `w0` in its first life."""
    tiers = bytes(len(added)) if tiers is None else tiers
    fields = {"worker_id": "w0", "incarnation": 1, "removed": names(*removed), **fields}
    return WorkerPrefixes(seq=seq, added=names(*added), tiers=tiers, **fields)
