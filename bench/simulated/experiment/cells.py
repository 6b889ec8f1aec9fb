"""Run one cell of an experiment, simulated or live, and return flat figures.

Both modes report requests, failures, tokens per second, normalized latency, TTFT and job completion time.
Only simulated cells have SLO attainment.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.kit.datasets import data_folder
from bench.kit.stacks import start_stack
from bench.kit.stats import mean_interval, percentile
from bench.live.chats import LiveRun, chat_bodies, run_load
from bench.simulated.ecoserve.measures import measure_reference
from bench.simulated.experiment.grid import Experiment, GridCell
from shared.plugins import absolute
from sim.case import Case, run_case
from sim.requests import ServedRecord
from sim.summary import summarize
from sim.workloads import WORKLOADS, Source, find_source


@dataclass(frozen=True)
class CellQuestion:
    """A cell of an experiment, picklable for a sweep."""

    experiment: Experiment
    cell: GridCell


@dataclass(frozen=True)
class CellAnswer:
    """Figures of a cell, and one row per request."""

    figures: dict[str, float]
    rows: list[dict[str, Any]]


def source_of(trace: str) -> Source:
    """Return the workload called `trace`, else the trace file at that path."""
    return find_source(trace, data_folder()) if trace in WORKLOADS else Source(path=Path(trace))


def answer_simulated(question: CellQuestion) -> CellAnswer:
    """Simulate a cell. SLOs come from `vllm` at a tenth of its capacity on the same trace, as in
    `sim-ecoserve`."""
    experiment, cell = question.experiment, question.cell
    case = Case(
        source=source_of(cell.trace),
        policy=cell.policy,
        predictor=cell.predictor,
        machine=experiment.machine,
        rate_per_s=cell.rate,
        requests=experiment.requests,
        seed=cell.seed,
        options=tuple(sorted(experiment.options.get(cell.policy, {}).items())),
        workers=experiment.workers,
        placement=cell.placement,
        eviction=cell.eviction,
    )
    peer = Case(case.source, "vllm", "none", case.machine, requests=min(500, case.requests), seed=cell.seed)
    level = measure_reference(peer).level
    level = type(level)(level.prefill_s, level.token_s, experiment.slo_scale)
    outcome = run_case(case)
    return CellAnswer(summarize(outcome, level) | {"failures": 0.0}, [_row(one) for one in outcome.records])


def _row(record: ServedRecord) -> dict[str, Any]:
    return {
        "arrival_s": record.request.arrival_s,
        "prompt_tokens": record.request.prompt_tokens,
        "output_tokens": record.request.output_tokens,
        "ttft_s": record.first_token_s - record.request.arrival_s,
        "jct_s": record.jct_s,
        "queue_s": record.queue_s,
        "evictions": record.evictions,
        "pauses": record.pauses,
    }


def answer_live(experiment: Experiment, cell: GridCell, folder: Path) -> CellAnswer:
    """Run one turn on a new stack. Requests are chats for Tiny Chat."""
    settings = {
        "scheduler.policy": absolute(cell.policy),
        "predictor.model": absolute(cell.predictor),
        "placement.policy": absolute(cell.placement),
        "worker.prefix_cache.eviction": absolute(cell.eviction),
        **experiment.settings,
    }
    if cell.policy in experiment.options:
        settings["scheduler.policy_options"] = dict(experiment.options[cell.policy])
    bodies = chat_bodies(experiment.requests, cell.seed, experiment.max_tokens)
    with start_stack(folder.resolve() / "stack", settings, workers=experiment.workers) as stack:
        run = run_load(stack, bodies, cell.rate, cell.seed, experiment.max_tokens)
    return CellAnswer(_live_figures(run), _live_rows(run))


def over_turns(turns: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return means over turns, with each interval as NAME_low and NAME_high; requests and failures are
    summed."""
    figures: dict[str, float] = {"turns": float(len(turns))}
    for name in set.intersection(*(set(turn) for turn in turns)):
        values = [turn[name] for turn in turns]
        figures[name] = sum(values) if name in ("requests", "failures") else fmean(values)
        if name in ("normalized_s", "ttft_s_p50", "jct_s"):
            figures[f"{name}_low"], figures[f"{name}_high"] = mean_interval(values)
    return figures


def _live_rows(run: LiveRun) -> list[dict[str, Any]]:
    return [
        {
            "arrival_s": one.sent_s - run.start_s,
            "prompt_tokens": one.prompt_tokens,
            "output_tokens": one.completion_tokens,
            "ttft_s": one.first_s if one.event_s else None,
            "jct_s": one.ended_s - one.sent_s,
            "error": one.error,
        }
        for one in run.answers
    ]


def _live_figures(run: LiveRun) -> dict[str, float]:
    good = [one for one in run.answers if one.ok and one.completion_tokens and one.event_s]
    figures = {"requests": float(len(run.answers)), "failures": float(run.failures)}
    if not good:
        return figures
    span_s = max(one.ended_s for one in good) - min(one.sent_s for one in good)
    ttft_s = [one.first_s for one in good]
    jct_s = [one.ended_s - one.sent_s for one in good]
    return figures | {
        "requests_per_s": len(good) / span_s,
        "tokens_per_s": sum(one.completion_tokens for one in good) / span_s,
        "normalized_s": fmean(s / one.completion_tokens for s, one in zip(jct_s, good, strict=True)),
        "jct_s": fmean(jct_s),
        "jct_s_p95": percentile(jct_s, 95),
        "ttft_s_p50": percentile(ttft_s, 50),
        "ttft_s_p99": percentile(ttft_s, 99),
    }
