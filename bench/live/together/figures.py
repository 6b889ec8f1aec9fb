"""Figures from turns: rates of each side, and everything against each mechanism alone. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.kit.outcome import Table
from bench.kit.stats import geometric_mean, median_of_ratios, percentile, with_interval
from bench.live.together.rungs import AGAINST

NONE, EVERYTHING, AMPLE = "none", "everything", "ample"


@dataclass(frozen=True)
class Turn:
    """One run of one workload on one side."""

    tok_s: float
    """Output tokens of complete answers per second until the last answer ended; above 0."""
    work_tok_s: float
    """The same with their prompts."""
    ttft_s: Sequence[float]
    """Time from sending to the first text of each served request."""
    unserved: int
    """Requests refused, failed, or answered with the wrong length."""


Turns = Mapping[str, Mapping[str, Sequence[Turn]]]
"""Turns by workload and side, equally many everywhere and in order."""
_Rates = Mapping[str, Mapping[str, float]]
"""Tokens per second in one turn, by workload and side."""


def figures_of(turns: Turns, short: Sequence[str], harmless: Sequence[str]) -> dict[str, float]:
    """Return the figures. `short` and `harmless` name the workloads with short and with enough memory.

    Sides are `none`, `everything`, `ample` and single mechanisms. Figures without a workload of their kind
    are left out.
    """
    figures: dict[str, float] = {}
    for workload, by_side in turns.items():
        for side, own in by_side.items():
            name = f"{workload}_{side}"
            figures[f"tok_s_{name}"] = median(turn.tok_s for turn in own)
            figures[f"work_tok_s_{name}"] = median(turn.work_tok_s for turn in own)
            if firsts := [each for turn in own for each in turn.ttft_s]:
                figures[f"p99_ttft_s_{name}"] = percentile(firsts, 99)
            figures[f"unserved_{name}"] = sum(turn.unserved for turn in own)
    rounds = _rounds(turns, lambda turn: turn.tok_s)
    worked = _rounds(turns, lambda turn: turn.work_tok_s)
    for workload in short:
        figures[f"vs_best_single_{workload}"] = _against(rounds, workload, _singles(turns, workload))
        if AMPLE in turns[workload]:
            figures[f"of_ample_{workload}"] = _against(rounds, workload, [AMPLE])
    for workload in turns:
        figures[f"vs_none_{workload}"] = _against(rounds, workload, [NONE])
        figures[f"work_vs_none_{workload}"] = _against(worked, workload, [NONE])

    def best(some: Sequence[_Rates], _: Sequence[_Rates]) -> float:
        return geometric_mean(_against(some, each, _singles(turns, each)) for each in short)

    def none(some: Sequence[_Rates], _: Sequence[_Rates]) -> float:
        return geometric_mean(_against(some, each, [NONE]) for each in short)

    def least(some: Sequence[_Rates], _: Sequence[_Rates]) -> float:
        return min(_against(some, each, [NONE]) for each in harmless)

    if short:
        for name, of in (("vs_best_single", best), ("vs_none", none)):
            figures |= with_interval(f"work_{name}", worked, worked, of)
            figures |= with_interval(name, rounds, rounds, of)
    if harmless:
        figures |= with_interval("harmless", rounds, rounds, least)
    every = [turn for by_side in turns.values() for turn in by_side[EVERYTHING]]
    return figures | {"unserved": float(sum(turn.unserved for turn in every))}


def _against(rounds: Sequence[_Rates], workload: str, sides: Sequence[str]) -> float:
    """Return the median ratio within a turn of everything to the best of `sides`."""
    own = [rates[workload] for rates in rounds]
    ours = [rates[EVERYTHING] for rates in own]
    return min(median_of_ratios(ours, [rates[side] for rates in own]) for side in sides)


def _singles(turns: Turns, workload: str) -> list[str]:
    return [side for side in turns[workload] if side not in (NONE, EVERYTHING, AMPLE)]


def _rounds(turns: Turns, rate: Callable[[Turn], float]) -> list[_Rates]:
    """Return the rates by turn."""
    count = min(len(own) for by_side in turns.values() for own in by_side.values())
    return [
        {
            workload: {side: rate(own[at]) for side, own in by_side.items()}
            for workload, by_side in turns.items()
        }
        for at in range(count)
    ]


def rung_figures(workload: str, by_side: Mapping[str, Sequence[Turn]]) -> dict[str, float]:
    """Return the rates of each variant, and `speed_of_…`: its rate over that of the variant it differs from
    by one rung, in the same turn."""
    figures: dict[str, float] = {}
    for side, own in by_side.items():
        name, base = f"{workload}_{side}", AGAINST.get(side, "all")
        figures[f"tok_s_{name}"] = median(turn.tok_s for turn in own)
        figures[f"unserved_{name}"] = sum(turn.unserved for turn in own)
        if side != base and base in by_side:
            ours, theirs = ([turn.tok_s for turn in each] for each in (own, by_side[base]))
            figures |= with_interval(f"speed_of_{name}", ours, theirs, median_of_ratios)
    return figures


def table_of(workload: str, title: str, by_side: Mapping[str, Sequence[Turn]]) -> Table:
    """Return the table of one workload, with a row per side."""
    first = EVERYTHING if EVERYTHING in by_side else next(iter(by_side))
    columns = ("side", "tok/s", "with prompts", f"{first} / it", "p99 first token, s", "unserved", "requests")
    reference = [turn.tok_s for turn in by_side[first]]
    lines = []
    for side, own in by_side.items():
        firsts = [each for turn in own for each in turn.ttft_s]
        speeds, unserved = [turn.tok_s for turn in own], sum(turn.unserved for turn in own)
        rates = (median(speeds), median(turn.work_tok_s for turn in own), median_of_ratios(reference, speeds))
        first_s = percentile(firsts, 99) if firsts else ""
        lines.append((side, *rates, first_s, unserved, unserved + len(firsts)))
    return Table(f"{workload}: {title}", columns, lines)
