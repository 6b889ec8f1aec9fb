"""Pictures of simulated runs: latency against rate, where the time goes, sensitivities. PNG, no display."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.kit.plots import Figure, picture
from sim.summary import PARTS

Curve = Sequence[tuple[float, float]]
_MARKS = "os^vDP*X<>hd"


@picture
def draw_latency(path: Path, title: str, curves: Mapping[str, Curve], limit_s: float) -> None:
    """One line per side: (rate per s, normalized latency in s); the limit dashed; cut at 20 limits."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for index, (label, curve) in enumerate(curves.items()):
        rates, latencies = zip(*sorted(curve), strict=True)
        axes.plot(rates, latencies, label=label, marker=_MARKS[index % len(_MARKS)], markersize=4)
    axes.axhline(limit_s, linestyle="--", color="grey", linewidth=1)
    axes.set(title=title, xlabel="requests / s", ylabel="normalized latency, s / token")
    axes.set_yscale("log")
    axes.set_ylim(top=20 * limit_s)
    axes.legend(fontsize="small")
    figure.savefig(path, format="png")


@picture
def draw_parts(path: Path, title: str, rows: Mapping[str, Mapping[str, float]]) -> None:
    """Stacked bars: what the mean job completion time of each side consists of."""
    figure = Figure(figsize=(7, 0.4 * len(rows) + 1.6), layout="constrained")
    axes = figure.add_subplot()
    labels, left = list(rows), [0.0] * len(rows)
    for part in PARTS:
        widths = [rows[label][part] for label in labels]
        axes.barh(labels, widths, left=left, label=part.removesuffix("_s").replace("_", " "))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(title=title, xlabel="mean job completion time, s")
    axes.legend(fontsize="small")
    figure.savefig(path, format="png")


@picture
def draw_sensitivity(path: Path, parameter: str, curves: Mapping[str, Mapping[str, Curve]]) -> None:
    """One panel per figure (JCT, throughput, SLO), one line per trace, each over its largest value."""
    figure = Figure(figsize=(3.2 * len(curves), 3.2), layout="constrained")
    for index, (name, lines) in enumerate(curves.items()):
        axes = figure.add_subplot(1, len(curves), index + 1)
        for mark, (trace, curve) in zip(_MARKS, lines.items(), strict=False):
            top = max((value for _, value in curve), default=0.0) or 1.0
            axes.plot([x for x, _ in curve], [y / top for _, y in curve], marker=mark, label=trace)
        axes.set(title=name, xlabel=parameter)
        axes.legend(fontsize="small")
    figure.savefig(path, format="png")
