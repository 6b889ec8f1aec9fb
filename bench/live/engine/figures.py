"""Figures of the engine bench from its cells. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.kit.outcome import Table
from bench.kit.plots import Chart, draw_lines
from bench.kit.stats import Ratio, geometric_mean, ratio_of
from bench.live.engine.duel import BatchCell

Rows = Sequence[Mapping[str, Any]]


def figures(rows: Rows, cells: Sequence[BatchCell], peer: str) -> dict[str, float]:
    """Return ratios, tokens per second of both sides, and the load of the cores.

    `tok_s_ratio_b8` and `…_worst` are over all contexts of a batch size, `…_b8_ctx500` is one cell's. A cell
    without a complete alternation has no figure.
    """
    made: dict[str, float] = {}
    for batch in sorted({cell.batch for cell in cells}):
        by_context: dict[int, dict[int, float]] = {}
        for cell in (one for one in cells if one.batch == batch):
            if paired := _pairs(rows, cell.name, peer, "tok_s"):
                made |= _ratio_figures(f"tok_s_ratio_{cell.name}", _ratio(paired))
                made |= _cell_figures(rows, cell.name, peer)
                by_context[cell.context] = {turn: ours / theirs for turn, (ours, theirs) in paired.items()}
        if combined := _combined(list(by_context.values())):
            made[f"tok_s_ratio_b{batch}"] = statistics.median(combined)
            made[f"tok_s_ratio_b{batch}_worst"] = min(combined)
    if shares := [row["client_share"] for row in rows if "client_share" in row]:
        made["client_share_max"] = max(shares)
    return made


def table(rows: Rows, cells: Sequence[BatchCell], peer: str) -> Table:
    """Return a table of tokens per second of both sides for each workload."""
    lines: list[Sequence[object]] = []
    for cell in cells:
        if paired := _pairs(rows, cell.name, peer, "tok_s"):
            ratio = _ratio(paired)
            decode = _pairs(rows, cell.name, peer, "decode_tok_s")
            lines.append(
                (
                    cell.name,
                    len(paired),
                    *(statistics.median(column) for column in zip(*paired.values(), strict=True)),
                    ratio.median,
                    ratio.worst,
                    _ratio(decode).median if decode else "-",
                )
            )
    columns = ("workload", "alternations", "kvasir tok/s", f"{peer} tok/s", "ratio", "worst", "decode only")
    return Table(f"engine: kvasir against {peer}", columns, lines)


def _pairs(rows: Rows, cell: str, peer: str, value: str) -> dict[int, tuple[float, float]]:
    """Return (ours, theirs) by alternation, without turns that have a failed request."""
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        if row["cell"] == cell and not row["failures"] and row.get(value, 0) > 0:
            found.setdefault(row["alternation"], {})[row["side"]] = row[value]
    return {
        turn: (sides["kvasir"], sides[peer])
        for turn, sides in sorted(found.items())
        if {"kvasir", peer} <= set(sides)
    }


def _ratio(paired: Mapping[int, tuple[float, float]]) -> Ratio:
    ours, theirs = zip(*paired.values(), strict=True)
    return ratio_of(ours, theirs)


def _ratio_figures(name: str, ratio: Ratio) -> dict[str, float]:
    return {name: ratio.median, f"{name}_worst": ratio.worst}


def _cell_figures(rows: Rows, cell: str, peer: str) -> dict[str, float]:
    made: dict[str, float] = {}
    for side in ("kvasir", peer):
        own = [row for row in rows if row["cell"] == cell and row["side"] == side]
        for value in ("tok_s", "decode_tok_s", "ttft_ms_p50", "itl_ms_p50", "engine_share", "rest_share"):
            if values := [row[value] for row in own if value in row]:
                made[f"{value}_{cell}_{side}"] = statistics.median(values)
    if decode := _pairs(rows, cell, peer, "decode_tok_s"):
        made[f"decode_ratio_{cell}"] = _ratio(decode).median
    return made


def _combined(by_context: Sequence[Mapping[int, float]]) -> list[float]:
    """Return the geometric mean of the contexts' ratios for each alternation that all have."""
    if not by_context:
        return []
    turns = set.intersection(*(set(one) for one in by_context))
    return [geometric_mean(one[turn] for one in by_context) for turn in sorted(turns)]


def draw(file: Path, figures: Mapping[str, float], workload: Sequence[BatchCell], peer: str) -> None:
    """Draw our ratio over the batch size, one line per context, with lines down to the worst alternation."""
    curves: dict[str, list[tuple[float, float]]] = {}
    worst: dict[str, list[float]] = {}
    for cell in workload:
        name, label = f"tok_s_ratio_{cell.name}", f"context {cell.context}"
        if name in figures:
            curves.setdefault(label, []).append((cell.batch, figures[name]))
            worst.setdefault(label, []).append(figures[f"{name}_worst"])
    axes = ("concurrent requests", f"tokens/s, kvasir / {peer}")
    draw_lines(file, Chart(curves, "", *axes, dashed_y=1.0, log_x=2, down_to=worst))
