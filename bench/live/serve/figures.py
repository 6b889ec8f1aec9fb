"""Figures of the serve bench from its cells. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from math import isclose
from typing import Any

from bench.kit.outcome import Table
from bench.live.serve.sides import BASE, LENGTHS, MECHANISMS, ORACLE, OURS, PEER

Rows = Sequence[Mapping[str, Any]]
BEYOND = 1.2
"""Multiple of the reference's knee at which SLO attainment is compared."""
LATENCY_FACTOR = 3.0
"""A rate is not sustained above this multiple of the reference's normalized latency at low load."""


def yardstick(rows: Rows) -> str:
    """Return the side that sets limits and levels: the peer if there is one."""
    return PEER if any(row["side"] == PEER for row in rows) else BASE


def limit_ms(rows: Rows) -> float | None:
    """Return the limit of normalized latency; None until the low load is measured."""
    low = [row["normalized_ms"] for row in rows if row["kind"] == "low" and row["side"] == yardstick(rows)]
    return LATENCY_FACTOR * statistics.median(low) if low else None


def is_sustained(of_rate: Rows, limit: float) -> bool:
    """Whether a rate is sustained; `of_rate` has all repeats of one side at it."""
    worst = sum(row["failures"] for row in of_rate)
    return not worst and statistics.median(row["normalized_ms"] for row in of_rate) <= limit


def figures(rows: Rows, knees: Mapping[str, float]) -> dict[str, float]:
    """Return the figures; `knees` has the sustained rate of each side whose search has ended.

    Measurements that are missing have no figure.
    """
    base, made = yardstick(rows), {}
    for side, rate in knees.items():
        made[f"sustained_{side}"] = rate
    for name, above, below in (
        ("sustained_rate_ratio", OURS, PEER),
        ("sustained_rate_ratio_oracle", ORACLE, PEER),
        ("policy_factor", OURS, BASE),
        ("policy_factor_oracle", ORACLE, BASE),
        ("engine_factor", BASE, PEER),
        ("prediction_factor", OURS, ORACLE),
        ("prediction_factor_lengths", LENGTHS, ORACLE),
        *((f"sustained_rate_ratio_{name}", name, PEER) for name in MECHANISMS),
        *((f"factor_{name}", name, OURS) for name in MECHANISMS),
    ):
        if knees.get(above) and knees.get(below):
            made[name] = knees[above] / knees[below]
    if base in knees:
        at_rate = [row for row in rows if is_beyond(row, knees[base])]
        made |= _attainments(at_rate, base, "attained", "slo")
        made |= _attainments(at_rate, base, "attained_first", "slo_first")
    for kind, field, name in (
        ("low", "normalized_ms", "low_normalized_ms"),
        ("low", "ttft_ms_p50", "low_ttft_ms"),
        ("low", "itl_ms_p50", "low_itl_ms"),
        ("burst", "tok_s", "burst_tok_s"),
    ):
        for side in _sides(rows):
            values = [row[field] for row in rows if row["kind"] == kind and row["side"] == side]
            if values:
                made[f"{name}_{side}"] = statistics.median(values)
    return made


def of_engines(rows: Rows, made: Mapping[str, float]) -> dict[str, float]:
    """Return price and gains of our control plane beside `vllm serve`, if vLLM is every side's engine.

    Prices are medians over turns with both measurements, with the worst turn."""
    found = {
        name: made[source]
        for name, source in (
            ("sustained_gain", "sustained_rate_ratio"),
            ("slo_gain", "slo_ratio"),
            ("prefix_gain", "factor_tiers"),
        )
        if source in made
    }
    prices = [1 - ours / theirs for ours, theirs in _pairs(rows, "burst", "tok_s") if theirs]
    added = [ours - theirs for ours, theirs in _pairs(rows, "low", "ttft_ms_p50")]
    for name, turns in (("price_throughput", prices), ("added_ttft_ms_p50", added)):
        if turns:
            found |= {name: statistics.median(turns), f"{name}_worst": max(turns)}
    return found


def _pairs(rows: Rows, kind: str, field: str) -> list[tuple[float, float]]:
    """Return (our side with policy `vllm`, peer) by turn."""
    ours, theirs = (
        {row["repeat"]: row[field] for row in rows if row["kind"] == kind and row["side"] == side}
        for side in (BASE, PEER)
    )
    return [(ours[turn], theirs[turn]) for turn in sorted(ours.keys() & theirs.keys())]


def is_beyond(row: Mapping[str, Any], knee_per_s: float) -> bool:
    """Whether the row is for comparing levels with a reference of this knee."""
    return row["kind"] == "beyond" and isclose(row["rate_per_s"], BEYOND * knee_per_s, rel_tol=1e-3)


def _attainments(rows: Rows, base: str, field: str, prefix: str) -> dict[str, float]:
    """Return attainment by side, and our ratio to the others, by turn."""
    by_side: dict[str, dict[int, tuple[float, int]]] = {}
    for row in rows:
        if row[field] is not None:
            by_side.setdefault(row["side"], {})[row["repeat"]] = (row[field], row["requests"])
    made = {
        f"{prefix}_{side}": statistics.median(share for share, _ in turns.values())
        for side, turns in by_side.items()
    }
    for name, above, below in (
        (f"{prefix}_ratio", OURS, base),
        (f"{prefix}_ratio_oracle", ORACLE, base),
        (f"{prefix}_policy_factor", OURS, BASE),
    ):
        ratios = _ratios(by_side.get(above, {}), by_side.get(below, {}))
        if ratios:
            made[name] = statistics.median(ratios)
            made[f"{name}_worst"] = min(ratios)
    return made


def _ratios(ours: Mapping[int, tuple[float, int]], theirs: Mapping[int, tuple[float, int]]) -> list[float]:
    """Return ratios by turn; an attainment of zero counts as one request."""
    return [ours[turn][0] / max(share, 1 / count) for turn, (share, count) in theirs.items() if turn in ours]


def headline(made: Mapping[str, float]) -> list[str]:
    """Return the names of the main figures."""
    wanted = (
        "sustained_rate_ratio", "policy_factor", "slo_ratio", "slo_ratio_worst", "engine_factor",
        "policy_factor_oracle", "prediction_factor", "sustained_rate_ratio_oracle", "slo_ratio_oracle",
        "price_throughput", "added_ttft_ms_p50", "prefix_gain",
    )  # fmt: skip
    return [name for name in made if name in wanted or name.startswith(("sustained_", "slo_"))]


def table(rows: Rows) -> Table:
    """Return every cell, by side and rate."""
    columns = (
        "side", "kind", "rate /s", "requests", "normalized ms", "TTFT ms p50", "tok/s", "SLO kept",
        "engine busy", "failures",
    )  # fmt: skip
    lines = [
        (
            row["side"], row["kind"], row["rate_per_s"], row["requests"], row["normalized_ms"],
            row["ttft_ms_p50"], row["tok_s"], "-" if row["attained"] is None else row["attained"],
            row["engine_share"], row["failures"],
        )
        for row in sorted(rows, key=lambda row: (row["side"], row["rate_per_s"], row["repeat"]))
    ]  # fmt: skip
    return Table("cells", columns, lines)


def curves(rows: Rows) -> dict[str, list[tuple[float, float]]]:
    """Return (rate per s, normalized latency in s) by side, as medians over repeats, without bursts."""
    found: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        if row["kind"] != "burst" and row["normalized_ms"] > 0:
            of_side = found.setdefault(row["side"], {})
            of_side.setdefault(row["rate_per_s"], []).append(row["normalized_ms"] / 1e3)
    return {
        side: sorted((rate, statistics.median(values)) for rate, values in of_rate.items())
        for side, of_rate in found.items()
    }


def _sides(rows: Rows) -> list[str]:
    return sorted({row["side"] for row in rows})
