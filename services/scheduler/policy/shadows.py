"""Whether a running sequence needs a copy of its KV at another worker, and at which. Pure.

If a worker dies, its sequences must be recomputed. A copy costs a transfer now and memory. It is worthwhile
if the recomputation would take long and the link is faster. Unmeasured links are assumed to be faster.
"""

from collections.abc import Iterable

from shared.messages.reports import WorkerReported


def can_keep(source: WorkerReported, keeper: WorkerReported, limit_tokens: int) -> bool:
    """Return whether `keeper` can use blocks of `source` and run a sequence of `limit_tokens`."""
    is_kin = bool(source.fingerprint) and source.fingerprint == keeper.fingerprint
    is_linked = source.kv_block_bytes > 0 and keeper.kv_block_bytes > 0
    shares = source.caches_prefixes and keeper.caches_prefixes
    return is_kin and is_linked and shares and limit_tokens <= keeper.max_context_tokens


def recompute_s(tokens: int, report: WorkerReported) -> float:
    """Return the seconds to recompute `tokens` there; 0 if not measured."""
    return tokens / report.prefill_tokens_per_s if report.prefill_tokens_per_s > 0 else 0.0


def is_worth(missing_tokens: int, source: WorkerReported, keeper: WorkerReported) -> bool:
    """Return whether the transfer to `keeper` is faster than computing there; also True if nothing is
    missing."""
    bytes_per_s = keeper.link_bytes_per_s.get(source.worker_id)
    if bytes_per_s is None or not missing_tokens:
        return True
    size_bytes = missing_tokens / source.block_tokens * source.kv_block_bytes
    return bytes_per_s > 0 and size_bytes / bytes_per_s < recompute_s(missing_tokens, keeper)


def choose_keeper(
    tokens: int, limit_tokens: int, source: WorkerReported, others: Iterable[WorkerReported]
) -> str | None:
    """Return the worker that should keep a copy of `tokens` tokens, or None.

    Workers with room for the whole copy come first, then those with free memory to run the sequence.
    """
    blocks = -(-tokens // source.block_tokens)

    def rank(one: WorkerReported) -> tuple[bool, bool, int, str]:
        plannable = one.capacity.plannable_blocks
        return (one.shadow_room_blocks >= blocks, plannable > blocks, plannable, one.worker_id)

    able = [
        one
        for one in others
        if one.shadow_room_blocks > 0
        and can_keep(source, one, limit_tokens)
        and is_worth(tokens, source, one)
    ]
    return max(able, key=rank).worker_id if able else None
