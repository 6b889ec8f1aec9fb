"""Rows about the fleet, made from heartbeats, for the live page and for metrics. Pure. Block sizes differ
between workers; compare them in tokens."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from shared.messages.reports import CacheReport, SequenceReport, SequenceState, WorkerReported

NO_CACHE = CacheReport()


def worker_row(report: WorkerReported, heard_s: float) -> dict[str, Any]:
    """Return a worker's row. Used, evictable and free blocks add up to the device's; lent ones are extra."""
    capacity, cache = report.capacity, report.cache or NO_CACHE
    states = Counter(str(sequence.state) for sequence in report.sequences)
    free, evictable = capacity.free_blocks, capacity.evictable_blocks
    return {
        "id": report.worker_id,
        "model": report.model,
        "heard_s": round(heard_s, 2),
        "block_tokens": report.block_tokens,
        "blocks": {
            "total": capacity.total_blocks,
            "used": max(0, capacity.total_blocks - free - evictable),
            "evictable": evictable,
            "free": free,
            "borrowed": capacity.borrowed_blocks,
            "lent": capacity.lent_blocks,
            "host_lent": capacity.host_lent_blocks,
            "host": cache.host_blocks,
            "host_used": cache.host_used_blocks,
            "disk": cache.disk_blocks,
            "disk_used": cache.disk_used_blocks,
            "peer": cache.peer_blocks,
            "peer_used": cache.peer_used_blocks,
        },
        "sequences": {str(state): states.get(str(state), 0) for state in SequenceState},
        "hits": {
            "device": cache.device_hits,
            "host": cache.host_hits,
            "disk": cache.disk_hits,
            "peer": cache.peer_hits,
            "borrowed": cache.borrowed_hits,
            "misses": cache.misses,
        },
        "written": {"host": cache.host_written, "disk": cache.disk_written, "peer": cache.peer_written},
        "decode_ms": round(report.decode_step_s * 1e3, 3),
        "prefill_tokens_per_s": round(report.prefill_tokens_per_s, 1),
        "busy": round(report.busy_share, 3),
        "swapped_layers": report.swapped_layers,
    }


def debt_rows(reports: Iterable[WorkerReported]) -> list[dict[str, Any]]:
    """Return the lent blocks by creditor and debtor, host memory included."""
    rows = []
    for report in reports:
        for debtor in {**report.lent_to_blocks, **report.host_lent_to_blocks}:
            host = report.host_lent_to_blocks.get(debtor, 0)
            device = report.lent_to_blocks.get(debtor, 0)
            row = {"creditor": report.worker_id, "debtor": debtor, "blocks": device, "host_blocks": host}
            rows.append(row)
    return rows


def totals_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums over all workers, in tokens where block sizes may differ."""

    def tokens(place: str) -> int:
        return sum(row["blocks"][place] * row["block_tokens"] for row in rows)

    def every(group: str, name: str) -> int:
        return sum(row[group][name] for row in rows)

    return {
        "workers": len(rows),
        "tokens": {place: tokens(place) for place in ("total", "used", "evictable", "free", "lent")},
        "sequences": {str(state): every("sequences", str(state)) for state in SequenceState},
        "hits": {
            name: every("hits", name) for name in ("device", "host", "disk", "peer", "borrowed", "misses")
        },
    }


def batch_rows(sequences: Iterable[SequenceReport]) -> list[dict[str, Any]]:
    """Return a worker's sequences, those with most blocks first."""
    rows = [
        {
            "request": sequence.ref.request_id,
            "choice": sequence.ref.choice,
            "attempt": sequence.ref.attempt,
            "state": str(sequence.state),
            "prompt_tokens": sequence.prompt_tokens,
            "generated_tokens": sequence.generated_tokens,
            "computed_tokens": sequence.computed_tokens,
            "max_tokens": sequence.max_tokens,
            "blocks": sequence.allocated_blocks,
            "waited_s": round(sequence.waited_s, 2),
        }
        for sequence in sequences
    ]
    return sorted(rows, key=lambda row: (-row["blocks"], row["request"]))
