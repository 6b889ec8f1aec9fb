"""Figures of one run: latencies, SLO attainment, use of time and memory.

Definitions follow papers/003 §4. Normalized latency is the mean of (end − arrival) / answer tokens. An SLO is
`slo_scale·(t_p + t_g·answer tokens)`, with t_p and t_g measured once, on the peer at low load. KVC
utilization covers only busy time: `kvc_utilization` counts tokens with KV, `kvc_allocated` counts allocated
blocks. An allocation failure is a request that was evicted or paused while decoding, for any reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sim.requests import ServedRecord
from sim.setup import Outcome

PARTS = ("queue_s", "prefill_s", "gt_wait_s", "decode_s", "preempted_s")


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """Latency objective of a request."""

    prefill_s: float
    """t_p: mean prefill at low load."""
    token_s: float
    """t_g: mean time of a decoded token at low load."""
    scale: float = 2.0

    def limit_s(self, output_tokens: int) -> float:
        return self.scale * (self.prefill_s + self.token_s * output_tokens)


def measure_level(outcome: Outcome, scale: float = 2.0) -> ServiceLevel:
    """Return the service level measured by a run at low load."""
    decoded = sum(record.request.output_tokens - 1 for record in outcome.records)
    decode_s = sum(record.decode_s for record in outcome.records)
    prefill_s = sum(record.prefill_s for record in outcome.records) / len(outcome.records)
    return ServiceLevel(prefill_s, decode_s / max(1, decoded), scale)


def normalized_latency_s(records: Sequence[ServedRecord]) -> float:
    """Return the mean latency in seconds per answer token."""
    return sum(record.normalized_s for record in records) / len(records)


def attainment(records: Sequence[ServedRecord], level: ServiceLevel, refused: int = 0) -> float:
    """Return the share of requests that meet the level; refused ones do not."""
    kept = sum(record.jct_s <= level.limit_s(record.request.output_tokens) for record in records)
    return kept / (len(records) + refused)


def summarize(outcome: Outcome, level: ServiceLevel | None = None) -> dict[str, float]:
    """Return the figures of one run; times in seconds unless the name says otherwise."""
    records, meters = outcome.records, outcome.meters
    first_s = min(record.request.arrival_s for record in records)
    span_s = max(record.end_s for record in records) - first_s
    ttft_s = np.array([record.first_token_s - record.request.arrival_s for record in records])
    jct_s = np.array([record.jct_s for record in records])
    queue_s = np.array([record.queue_s for record in records])
    tokens = sum(record.request.output_tokens for record in records)
    figures = {
        "requests": float(len(records)),
        "refused": outcome.refused / (len(records) + outcome.refused),
        "requests_per_s": len(records) / span_s,
        "tokens_per_s": tokens / span_s,
        "normalized_s": normalized_latency_s(records),
        "jct_s": float(jct_s.mean()),
        "jct_s_p95": float(np.percentile(jct_s, 95)),
        "ttft_s_p50": float(np.percentile(ttft_s, 50)),
        "ttft_s_p99": float(np.percentile(ttft_s, 99)),
        "wait_s_p99": float(np.percentile(queue_s, 99)),
        "wait_s_p999": float(np.percentile(queue_s, 99.9)),
        "tbt_s": _mean_token_gap_s(records),
        "alloc_failures": sum(r.evictions + r.pauses > 0 for r in records) / len(records),
        "evictions": float(sum(record.evictions for record in records)),
        "pauses": float(sum(record.pauses for record in records)),
    }
    for part in PARTS:
        figures[part] = float(np.mean([getattr(record, part) for record in records]))
    if level is not None:
        figures["slo"] = attainment(records, level, outcome.refused)
    busy_s = sum(meter.busy_s for meter in meters)
    capacity = outcome.shape.capacity_blocks * outcome.shape.block_tokens
    figures |= {
        "kvc_utilization": sum(meter.computed_token_s for meter in meters) / busy_s / capacity,
        "kvc_allocated": sum(m.allocated_block_s for m in meters) / busy_s / outcome.shape.capacity_blocks,
        "forward_tokens": sum(m.forward_tokens for m in meters) / sum(m.steps for m in meters),
        "plan_ms": 1e3 * sum(m.planning_s for m in meters) / max(1, sum(m.plans for m in meters)),
        "planning_share": sum(meter.planning_s for meter in meters) / busy_s,
    }
    return figures


def _mean_token_gap_s(records: Sequence[ServedRecord]) -> float:
    """Return the mean time between two tokens of one answer."""
    gaps_s = [
        (record.end_s - record.first_token_s) / (record.request.output_tokens - 1)
        for record in records
        if record.request.output_tokens > 1
    ]
    return float(np.mean(gaps_s)) if gaps_s else 0.0
