"""`python -m bench sim-ecoserve`: EcoServe, its ablation and `kvasir` against vLLM, FastGen and Orca.

Simulated: OPT-13B on one A100 with 15,360 tokens of KV (papers/003 §2.1), costs from DistServe's fit. `bench
sim-check` bounds the error against a real machine. Figures and rules: design notes in docs/simulator.md.
"""

from argparse import ArgumentParser, BooleanOptionalAction
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench.kit.context import Context
from bench.kit.datasets import data_folder
from bench.kit.outcome import Outcome, Table
from bench.kit.plots import draw_bars, draw_latency
from bench.simulated.ecoserve.comparison import PAST_KNEE, PEER, Comparison, Effort, add_curves, compare
from bench.simulated.ecoserve.headline import headline_figures, measure_headline
from bench.simulated.ecoserve.sides import (
    ABLATION,
    ORACLES,
    OTHERS,
    OURS,
    PREDICTOR,
    PREDICTORS,
    RIVALS,
    PolicySide,
    existing,
)
from shared.errors import ConfigError
from sim.case import Machine
from sim.knee import TOLERANCE
from sim.summary import PARTS
from sim.workloads import Source, find_source

TRACES = ("sharegpt", "alpaca", "books")
HEADLINE_TRACES = ("sharegpt", "azure", "alpaca", "books", "lmsys", "turns", "arxiv", "mooncake")
PREFIXES = {"ecoserve": "", "kvasir": "k_", "ecoserve_profile": "p_"}
"""Prefix of the figures, by side."""
_SHOWN = {
    "s/token": "normalized_s",
    "JCT s": "jct_s",
    "SLO": "slo",
    "KVC": "kvc_utilization",
    "fail": "alloc_failures",
}


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--traces", nargs="+", metavar="NAME", help=f"[{' '.join(TRACES)}, quick: sharegpt]")
    add("--trace", type=Path, metavar="PATH", help="a trace file instead of those")
    add("--policies", nargs="+", metavar="NAME", help="only these, beside the peer")
    add(
        "--predictor", default=PREDICTOR, choices=sorted(PREDICTORS), help="what our side knows [%(default)s]"
    )
    add("--requests", type=int, help="least of a run [500, quick: 200]")
    add("--duration", type=float, help="of arrivals at least, in s [600, quick: 60]")
    add("--seeds", type=int, help="runs per rate [2, quick: 1]")
    add(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        help="of sustained rates: above them, this is too much [%(default)s]",
    )
    add("--processes", type=int, help="[one per core]")
    add(
        "--headline",
        action="store_true",
        help="only what kvasir is to vllm by predictor, with intervals over seeds [7, quick: 2]",
    )
    add("--predictors", action="store_true", help="also every predictor, with our policies")
    add("--pictures", action=BooleanOptionalAction, help="which cost as many runs again [not with --quick]")


def run(context: Context) -> Outcome:
    """Run the bench. Raises ConfigError for unknown traces, policies and predictors."""
    flags = context.arguments
    effort = Effort(
        requests=flags.requests or (200 if context.quick else 500),
        duration_s=flags.duration or (60.0 if context.quick else 600.0),
        seeds=tuple(range(context.seed, context.seed + (flags.seeds or (1 if context.quick else 2)))),
        processes=flags.processes,
        tolerance=flags.tolerance,
    )
    if flags.headline:
        return _headline(context, effort)
    sides = _sides(flags.policies, flags.predictor, context.quick, flags.predictors)
    sources = _sources(flags.trace, flags.traces or (TRACES[:1] if context.quick else TRACES))
    machine = Machine()
    with context.progress("simulating", 3 * len(sources) * len(sides)) as bar:
        found = compare(sources, sides, machine, effort, lambda label: bar.advance(now=label))
    _record(context, found)
    tables = [*_tables(found)]
    if not context.quick if flags.pictures is None else flags.pictures:
        _draw(context, found, sides, machine, effort)
    figures = _figures(found)
    return Outcome(figures, 0, tables, _notes(found, effort, flags.predictor), simulated=True)


def _headline(context: Context, effort: Effort) -> Outcome:
    flags = context.arguments
    count = flags.seeds or (2 if context.quick else 7)
    effort = replace(effort, seeds=tuple(range(context.seed, context.seed + count)))
    sources = _sources(flags.trace, flags.traces or (TRACES[:1] if context.quick else HEADLINE_TRACES))
    with context.progress("seeds", len(sources) * count) as bar:
        found = measure_headline(sources, effort, lambda label: bar.advance(now=label))
    for (trace, seed), answers in found.items():
        for side, answer in answers.items():
            context.record({"trace": trace, "seed": seed, "side": side, **answer}, "seeds.jsonl")
    figures, tables = headline_figures(found)
    notes = [f"seeds {list(effort.seeds)}; {effort.duration_s:g} s of arrivals at the peer's capacity"]
    return Outcome(figures, 0, tables, notes, simulated=True)


def _sides(
    only: Sequence[str] | None, predictor: str, quick: bool, with_predictors: bool
) -> list[PolicySide]:
    wanted = (*RIVALS, *OURS, *ORACLES) if quick else (*RIVALS, *OURS, *ORACLES, *ABLATION, *OTHERS)
    if quick:
        wanted = tuple(side for side in wanted if side.policy != "ecoserve_profile")
    sides = existing(wanted, predictor)
    if with_predictors:
        sides += [
            PolicySide(f"{side.policy} {name}", side.policy, name)
            for side in existing(OURS)
            for name in PREDICTORS
            if name not in (predictor, "oracle")
        ]
    if only is None:
        return sides
    unknown = set(only) - {side.policy for side in sides}
    if unknown:
        raise ConfigError(f"no policy {', '.join(sorted(unknown))} to compare", param="policies")
    return [side for side in sides if side.policy in only or side.policy == PEER]


def _sources(path: Path | None, names: Sequence[str]) -> list[Source]:
    if path is not None:
        return [Source(path=path)]
    data = data_folder()
    return [find_source(name, data) for name in names]


def _figures(found: Sequence[Comparison]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for label, prefix in PREFIXES.items():
        for one in found:
            trace = one.source.name
            ratios = {
                f"rate_vs_{rival}_{trace}": one.rate_ratio(label, rival)
                for rival in (PEER, "fastgen", "orca")
            }
            ratios[f"slo_vs_vllm_{trace}"] = one.slo_ratio(label)
            ratios[f"stable_rate_vs_vllm_{trace}"] = one.stable_ratio(label, PEER)
            figures |= {prefix + name: ratio for name, ratio in ratios.items() if ratio is not None}
        figures |= _over_traces(found, label, prefix)
    return figures


def _over_traces(found: Sequence[Comparison], label: str, prefix: str) -> dict[str, float]:
    """Return means over the traces: rate gained with true lengths, memory in use, allocation failures."""
    known = [one for one in found if label in one.past_knee]
    if not known:
        return {}
    gaps = [one.rate_ratio(f"{label} oracle", label) for one in known]
    figures = {
        name: sum(one.past_knee[label][name] for one in known) / len(known)
        for name in ("kvc_utilization", "alloc_failures")
    }
    measured = [gap - 1 for gap in gaps if gap is not None]
    if measured:
        figures["oracle_gap"] = sum(measured) / len(measured)
    return {prefix + name: value for name, value in figures.items()}


def _tables(found: Sequence[Comparison]) -> list[Table]:
    tables = []
    for one in found:
        trace = one.source.name
        rows = [
            (
                *(label, rate, one.rate_ratio(label, PEER) or 0),
                *(one.stable[label], *(one.past_knee[label][name] for name in _SHOWN.values())),
            )
            for label, rate in one.knees.items()
        ]
        title = (
            f"{trace} (simulated): rate sustained at <= {one.reference.limit_s:.3f} s/token; "
            f"the rest at {PAST_KNEE} x the knee of {one.peer}, {one.knees[one.peer]:.2f} requests/s"
        )
        tables.append(Table(title, ("side", "rate/s", "/vllm", "stable", *_SHOWN), rows))
    return tables


def _record(context: Context, found: Sequence[Comparison]) -> None:
    for one in found:
        for label, rate in one.knees.items():
            row = {
                "trace": one.source.name,
                "side": label,
                "sustained_per_s": rate,
                "stable_per_s": one.stable[label],
            }
            row |= one.past_knee[label]
            context.record(row, "sides.jsonl")


def _draw(
    context: Context,
    found: Sequence[Comparison],
    sides: Sequence[PolicySide],
    machine: Machine,
    effort: Effort,
) -> None:
    shown = [side for side in sides if " " not in side.label and side not in OTHERS]
    with context.progress("rates for the pictures", 8 * len(found) * len(shown)) as bar:
        add_curves(found, shown, machine, effort, lambda label: bar.advance(now=label))
    ablation = [PEER, *(side.policy for side in ABLATION), *(side.policy for side in OURS)]
    ablation += [side.label for side in ORACLES]
    for one in found:
        trace = one.source.name
        title = f"{trace}, OPT-13B on A100 (simulated)"
        draw_latency(context.picture(f"latency_{trace}"), title, one.curves, one.reference.limit_s)
        _draw_parts(context.picture(f"jct_{trace}"), f"{title}, 1.2 × the knee of vllm", one.past_knee)
        rows = {label: one.past_knee[label] for label in ablation if label in one.past_knee}
        _draw_parts(context.picture(f"ablation_{trace}"), f"ablation, {title}", rows)


def _draw_parts(path: Path, title: str, rows: Mapping[str, Mapping[str, float]]) -> None:
    """Draw the parts of each side's mean job completion time."""
    parts = {
        part.removesuffix("_s").replace("_", " "): [row[part] for row in rows.values()] for part in PARTS
    }
    draw_bars(path, title, "mean job completion time, s", list(rows), parts, stacked=True)


def _notes(found: Sequence[Comparison], effort: Effort, predictor: str) -> list[str]:
    known = {side.policy for side in existing((*OURS, *ABLATION))}
    missing = sorted({side.policy for side in (*OURS, *ABLATION)} - known)
    generated = [one.source.name for one in found if one.source.path is None]
    runs = ", ".join(f"{one.requests} of {one.source.name}" for one in found)
    notes = [
        f"predictor of our policies: {predictor}; requests a run: {runs}; seeds {list(effort.seeds)}; "
        "vllm is the better of chunked and whole prompts",
        "stable: sustained, and the queue at the last arrival is worked off soon after",
    ]
    if generated:
        notes.append(f"lengths generated from fitted quantiles: {', '.join(generated)}")
    if missing:
        notes.append(f"there is no policy {', '.join(missing)}")
    return notes
