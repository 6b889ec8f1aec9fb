"""Whether a running sequence is worth a copy of its KV at another worker, and at which. Pure.

A worker that dies costs each of its readers the computation of prompt and answer so far. A copy of the whole
blocks elsewhere costs a transfer now and memory there. It pays where computing again would be felt, and where
the link is faster than the computation; where links and speeds were not measured, the first is assumed.
"""

from collections.abc import Iterable

from shared.messages.reports import WorkerReported


def can_keep(source: WorkerReported, keeper: WorkerReported, limit_tokens: int) -> bool:
    """Whether blocks of `source` mean anything at `keeper`, and a sequence of so many tokens could go on
    there."""
    is_kin = bool(source.fingerprint) and source.fingerprint == keeper.fingerprint
    is_linked = source.kv_block_bytes > 0 and keeper.kv_block_bytes > 0
    shares = source.caches_prefixes and keeper.caches_prefixes
    return is_kin and is_linked and shares and limit_tokens <= keeper.max_context_tokens


def recompute_s(tokens: int, report: WorkerReported) -> float:
    """What so many tokens take to be computed there again; 0: nobody has measured that."""
    return tokens / report.prefill_tokens_per_s if report.prefill_tokens_per_s > 0 else 0.0


def is_worth(missing_tokens: int, source: WorkerReported, keeper: WorkerReported) -> bool:
    """Whether these come to `keeper` sooner than it would compute them; to hear that none are missing costs
    nothing."""
    bytes_per_s = keeper.link_bytes_per_s.get(source.worker_id)
    if bytes_per_s is None or not missing_tokens:
        return True
    size_bytes = missing_tokens / source.block_tokens * source.kv_block_bytes
    return bytes_per_s > 0 and size_bytes / bytes_per_s < recompute_s(missing_tokens, keeper)


def choose_keeper(
    tokens: int, limit_tokens: int, source: WorkerReported, others: Iterable[WorkerReported]
) -> str | None:
    """The worker that is to keep a copy of so many tokens; None: nobody can, or it is worth it nowhere.

    One with room for all of the copy before one with less, and one that has memory free for the sequence
    itself before one that has not: it is where the sequence goes on.
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
