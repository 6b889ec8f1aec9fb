"""Claims of papers, the studies that measure them, and the verdict on a measured figure."""

import hashlib
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TypeVar

from bench.kit.plots import Chart, draw_bars, draw_lines
from bench.kit.provenance import ROOT

T = TypeVar("T")
X = TypeVar("X", str, int, float)
Figures = Mapping[str, float]
TODAY = "_today"
"""Suffix of the figure that compares with today's peer."""
_AT = "@"
_TOLERANCE, _IN_KIND = 0.1, 0.5
_CODE = ("services", "shared", "sim", "bench")


@dataclass(frozen=True, slots=True)
class Effort:
    """Size of a run: whole, or quick on a part of the workloads."""

    quick: bool
    seed: int = 0

    def pick(self, whole: T, quick: T) -> T:
        """Return the setting for this size."""
        return quick if self.quick else whole


class Rule(StrEnum):
    """How a paper states a figure."""

    RATIO = "ratio"
    """A factor; 1 is no effect."""
    LEAST = "≥"
    MOST = "≤"


class Verdict(StrEnum):
    """Comparison of a measured figure with the paper's."""

    REPRODUCED = "reproduced"
    IN_KIND = "reproduced in kind"
    NOT = "not reproduced"


@dataclass(frozen=True, slots=True)
class Claim:
    """One number of a paper. `figure` names what a study measures in the paper's set-up."""

    figure: str
    what: str
    source: str
    """Section or figure of the paper."""
    span: tuple[float, float]
    """The paper's range, the end nearest to no effect first; for a limit both are the limit."""
    rule: Rule = Rule.RATIO
    today: str = ""
    """Today's peer, whose figure is `figure` + `TODAY`."""
    turns: tuple[tuple[str, str], ...] = ()
    """(change of the set-up, its figure) pairs, measured to explain a claim that does not hold."""

    @property
    def said(self) -> str:
        """The paper's number as text."""
        least, most = (f"{end:.4g}" for end in self.span)
        if self.rule is not Rule.RATIO:
            return f"{self.rule}{least}"
        return least if least == most else f"{least}–{most}"


def points(picture: str, curves: Mapping[str, Mapping[X, float]]) -> dict[str, float]:
    """Return the picture's curves, or bars, by label and x, as figures."""
    return {f"{picture} {label}{_AT}{x}": y for label, curve in curves.items() for x, y in curve.items()}


def is_point(figure: str) -> bool:
    return _AT in figure


@dataclass(frozen=True, slots=True)
class Picture:
    """One figure of a paper in its axes, drawn from `points` of that name."""

    name: str
    title: str
    x: str
    """Label of the x axis; empty for bars."""
    y: str
    log_x: float = 0
    """Base of the x axis; 0 for a linear one."""
    said: tuple[tuple[str, float], ...] = ()
    """The paper's values, by x."""
    marks: bool = True

    def draw(self, path: Path, figures: Figures) -> None:
        """Draw the picture as PNG, if the figures have points of it."""
        rows: dict[str, dict[str, float]] = {}
        for figure, value in figures.items():
            label, _, x = figure.removeprefix(f"{self.name} ").rpartition(_AT)
            if is_point(figure) and figure.startswith(f"{self.name} "):
                rows.setdefault(label, {})[x] = value
        if rows and self.said:
            rows["the paper"] = dict(self.said)
        title = f"{self.title}, measured here"
        if rows and self.x:
            curves = {name: sorted((float(x), y) for x, y in row.items()) for name, row in rows.items()}
            draw_lines(path, Chart(curves, title, self.x, self.y, self.marks, log_x=self.log_x))
        elif rows:
            groups = list(dict.fromkeys(x for row in rows.values() for x in row))
            bars = {name: [row.get(x, 0.0) for x in groups] for name, row in rows.items()}
            draw_bars(path, title, self.y, groups, bars)


@dataclass(frozen=True, slots=True)
class Study:
    """One measurement that several claims of a paper share."""

    paper: str
    name: str
    set_up: str
    measure: Callable[[Effort], Figures]
    claims: Sequence[Claim]
    has_quick: bool = True
    """Whether its claims can hold in a quick run."""
    pictures: Sequence[Picture] = ()

    def key(self, effort: Effort) -> str:
        """Return a hash of the settings, and of the code that the figures depend on."""
        function = self.measure.func if isinstance(self.measure, partial) else self.measure
        own = Path(inspect.getfile(function))
        files = [own, *(file for part in _CODE for file in (ROOT / part).rglob("*.py"))]
        found = hashlib.sha256(f"{self.name} {effort}".encode())
        for file in sorted(set(files)):
            if file == own or file.parent != own.parent:
                found.update(file.read_bytes())
        return found.hexdigest()[:16]


def judge(claim: Claim, value: float) -> Verdict:
    """Compare one figure with the paper's number.

    A ratio is reproduced if its logarithm lies in the paper's range, give or take 10 %, and reproduced in
    kind if the effect has the same sign and at least half of the size. A limit may be missed by 5 %, in
    kind by 15 %.
    """
    if claim.rule is Rule.RATIO:
        effect, least, most = (math.log(max(1e-9, one)) for one in (value, *claim.span))
        share = effect / least
        if share >= 1 - _TOLERANCE and abs(effect) <= (1 + _TOLERANCE) * abs(most):
            return Verdict.REPRODUCED
        return Verdict.IN_KIND if share >= _IN_KIND else Verdict.NOT
    missed = claim.span[0] - value if claim.rule is Rule.LEAST else value - claim.span[0]
    if missed <= 0.05 * abs(claim.span[0]):
        return Verdict.REPRODUCED
    return Verdict.IN_KIND if missed <= 0.15 * abs(claim.span[0]) else Verdict.NOT


@dataclass(frozen=True, slots=True)
class Finding:
    """A claim with its verdict. A claim that does not hold is explained if one change turns it."""

    study: Study
    claim: Claim
    figures: Figures

    @property
    def value(self) -> float:
        return self.figures[self.claim.figure]

    @property
    def verdict(self) -> Verdict:
        return judge(self.claim, self.value)

    @property
    def is_beyond(self) -> bool:
        """Whether the effect is more than twice the paper's largest: then the set-ups differ somewhere."""
        is_ratio = self.claim.rule is Rule.RATIO and self.verdict is Verdict.IN_KIND
        return is_ratio and abs(math.log(self.value)) > 2 * abs(math.log(self.claim.span[1]))

    @property
    def turned_by(self) -> str:
        """The first change under which the claim holds, with its figure; empty if there is none."""
        for change, figure in self.claim.turns:
            if judge(self.claim, self.figures[figure]) is not Verdict.NOT:
                return f"{change}: {self.figures[figure]:.3g}"
        return ""

    @property
    def sentence(self) -> str:
        """The verdict, and for a claim that does not hold the changes that were measured."""
        if self.verdict is not Verdict.NOT:
            return f"{self.verdict}{', far beyond the paper' if self.is_beyond else ''}"
        if self.turned_by:
            return f"{self.verdict}; holds with {self.turned_by}"
        tried = ", ".join(f"{change}: {self.figures[figure]:.3g}" for change, figure in self.claim.turns)
        return f"{self.verdict}; {f'not turned by {tried}' if tried else 'no reason found'}"

    @property
    def is_explained(self) -> bool:
        return self.verdict is not Verdict.NOT or bool(self.turned_by)


def measured(study: Study, effort: Effort, folder: Path) -> Figures:
    """Return the figures of a study, from its file in `folder` if that was written by the same code."""
    file, key = folder / f"{study.name}{effort.pick('', '-quick')}.json", study.key(effort)
    if file.exists():
        there = json.loads(file.read_text())
        if there["key"] == key:
            return dict(there["figures"])
    figures = dict(study.measure(effort))
    part = file.with_suffix(".part")
    part.write_text(json.dumps({"key": key, "set_up": study.set_up, "figures": figures}, indent=2) + "\n")
    part.replace(file)
    return figures
