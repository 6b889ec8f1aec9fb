"""Line and bar charts as PNG files, drawn with matplotlib.

Without matplotlib a bench runs and prints that it draws no pictures.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

HAS_MATPLOTLIB = find_spec("matplotlib") is not None

if TYPE_CHECKING or HAS_MATPLOTLIB:
    from matplotlib.figure import Figure
else:
    Figure = None

P = ParamSpec("P")
Curve = Sequence[tuple[float, float]]
"""(x, y) pairs, sorted by x."""
_MARKS = "os^vDP*X<>hd"
_STYLES: Sequence[Any] = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))


@dataclass(frozen=True)
class Chart:
    """One panel with a line per label."""

    curves: Mapping[str, Curve]
    title: str = ""
    xlabel: str = ""
    ylabel: str = ""
    marks: bool = True
    dashed_y: float | None = None
    """A limit line."""
    log_x: float = 0
    """Base of the x axis; 0 for a linear one."""
    log_y: bool = False
    bottom: float | None = None
    top: float | None = None
    shaded: Sequence[tuple[float, float]] = ()
    """Shaded ranges of x."""
    down_to: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Lower end of a thin vertical line at each point of a curve, such as the worst value."""


def _picture(draw: Callable[P, None]) -> Callable[P, None]:
    """Wrap `draw` so that it prints one message and draws nothing without matplotlib."""

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> None:
        if HAS_MATPLOTLIB:
            draw(*args, **kwargs)
        else:
            _say_once()

    return drawn


@cache
def _say_once() -> None:
    print("no pictures, as matplotlib is not installed (`make dev` does that)", file=sys.stderr)


@_picture
def draw_lines(path: Path, *charts: Chart, beside: bool = False) -> None:
    """Draw charts below each other, or side by side with `beside`."""
    count = len(charts)
    size = (3.2 * count, 3.2) if beside else (7, 4.5 if count == 1 else 2.2 * count)
    figure = Figure(figsize=size, layout="constrained")
    for at, chart in enumerate(charts):
        _draw_chart(figure.add_subplot(*((1, count) if beside else (count, 1)), at + 1), chart)
    figure.savefig(path, format="png", dpi=110)


def _draw_chart(axes: Any, chart: Chart) -> None:
    for index, (label, curve) in enumerate(chart.curves.items()):
        xs, ys = zip(*curve, strict=True) if curve else ((), ())
        style = {"marker": _MARKS[index % len(_MARKS)], "markersize": 4} if chart.marks else {"linewidth": 1}
        below = [y - down for y, down in zip(ys, chart.down_to.get(label, ys), strict=True)]
        axes.errorbar(xs, ys, yerr=[below, [0.0] * len(ys)], label=label, **style)
    if chart.dashed_y is not None:
        axes.axhline(chart.dashed_y, linestyle="--", color="grey", linewidth=1)
    for first, last in chart.shaded:
        axes.axvspan(first, last, color="grey", alpha=0.2)
    axes.set(title=chart.title, xlabel=chart.xlabel, ylabel=chart.ylabel)
    if chart.log_x:
        axes.set_xscale("log", base=chart.log_x)
    if chart.log_y:
        axes.set_yscale("log")
    axes.set_ylim(bottom=chart.bottom, top=chart.top)
    if len(chart.curves) > 1:
        axes.legend(fontsize="small")


def draw_latency(path: Path, title: str, curves: Mapping[str, Curve], limit_s: float) -> None:
    """Draw (rate per s, normalized latency in s) per side, with a dashed limit; cut at 20 times the limit."""
    ordered = {label: sorted(curve) for label, curve in curves.items()}
    axes = ("requests / s", "normalized latency, s / token")
    draw_lines(path, Chart(ordered, title, *axes, dashed_y=limit_s, log_y=True, top=20 * limit_s))


@_picture
def draw_knees(
    path: Path,
    title: str,
    axes_labels: tuple[str, str],
    curves: Mapping[tuple[str, str], Curve],
    limit: tuple[str, float],
    knees: Mapping[str, tuple[str, float]],
) -> None:
    """Draw curves by (colour name, style name), with a named limit, up to 20 times the limit. `knees`
    gives a label and the x where a colour crosses the limit."""
    figure = Figure(figsize=(7.4, 4.6), layout="constrained")
    axes: Any = figure.add_subplot()
    colours = {name: f"C{at}" for at, name in enumerate(dict.fromkeys(colour for colour, _ in curves))}
    styles = dict(zip(dict.fromkeys(style for _, style in curves), _STYLES, strict=False))
    for (colour, style), curve in curves.items():
        xs, ys = zip(*sorted(curve), strict=True)
        line = styles.get(style, _STYLES[-1])
        axes.plot(xs, ys, color=colours[colour], linestyle=line, marker="o", markersize=3, linewidth=1.4)
    named, level = limit
    axes.set(title=title, xlabel=axes_labels[0], ylabel=axes_labels[1], yscale="log")
    low = min(y for curve in curves.values() for _, y in curve)
    axes.set_ylim(low / 1.8, min(20 * level, 1.3 * max(y for curve in curves.values() for _, y in curve)))
    axes.axhline(level, linestyle=(0, (1, 2)), color="black", linewidth=1)
    beside = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "xytext": (0, -12)}
    axes.annotate(named, (0.99, level), ha="right", **beside)
    _name_knees(axes, level, {colours[name]: knee for name, knee in knees.items()})
    _explain(axes, colours, styles if len(styles) > 1 else {})
    figure.savefig(path, format="png", dpi=110)


def _name_knees(axes: Any, level: float, knees: Mapping[str, tuple[str, float]]) -> None:
    """Draw a labelled line down from the limit for each colour."""
    for row, (colour, (label, x)) in enumerate(sorted(knees.items(), key=lambda each: each[1][1])):
        axes.plot([x, x], [axes.get_ylim()[0], level], color=colour, linewidth=0.8)
        axes.plot([x], [level], marker="v", markersize=6, color=colour, linestyle="none")
        place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "xytext": (3, 2)}
        axes.annotate(label, (x, 0.01 + 0.045 * row), color=colour, fontsize="small", **place)


def _explain(axes: Any, colours: Mapping[str, str], styles: Mapping[str, Any]) -> None:
    """Draw one legend: colours, then styles."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, linewidth=2, label=name) for name, colour in colours.items()]
    handles += [Line2D([], [], color="grey", linestyle=line, label=name) for name, line in styles.items()]
    axes.legend(handles=handles, fontsize="small", loc="upper left")


@_picture
def draw_bars(
    path: Path,
    title: str,
    unit: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    *,
    stacked: bool = False,
    dashed: float | None = None,
) -> None:
    """Draw one bar per series for each group, or with `stacked` one horizontal bar per group."""
    across = stacked or len(series) == 1
    size = (7, 0.4 * len(groups) + 1.6) if across else (1.2 + 1.5 * len(groups), 4)
    figure = Figure(figsize=size, layout="constrained")
    axes: Any = figure.add_subplot()
    width, left = 0.8 / len(series), [0.0] * len(groups)
    for index, (label, values) in enumerate(series.items()):
        if across:
            axes.barh(groups, values, left=left, label=label)
            left = [a + b for a, b in zip(left, values, strict=True)]
        else:
            axes.bar([at + index * width for at in range(len(groups))], values, width, label=label)
    if across:
        axes.invert_yaxis()
        axes.set(title=title, xlabel=unit)
    else:
        axes.set_xticks([at + 0.4 for at in range(len(groups))], groups)
        axes.set(title=title, ylabel=unit)
    if dashed is not None:
        axes.axvline(dashed, linestyle="--", color="grey", linewidth=1)
    axes.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=110)
