"""The headline of `bench sim-ecoserve`: the gain of `kvasir` over `vllm`, by length predictor.

A stack can have `histogram`, and `learned` if the trace has a trained model's predictions; a noisy oracle and
the truth are bounds. Rates are sustained by serving everybody. For service levels, `kvasir` refuses requests
with a long expected wait, as a stack does by default; refused ones count as late.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import truediv
from statistics import mean

from bench.kit.outcome import Table
from bench.kit.stats import interval, median_of_ratios
from bench.simulated.ecoserve.comparison import PAST_KNEE, PEER, Effort
from bench.simulated.ecoserve.measures import (
    KneeQuestion,
    RateQuestion,
    Reference,
    answer_knee,
    answer_rate,
    measure_reference,
)
from services.scheduler.policy.contract import REFUSE_WAIT_S
from sim.case import Case, Machine
from sim.sweep import sweep
from sim.workloads import Source, has_predictions, longest_tokens

PREDICTORS = ("histogram", "sigma0.5", "oracle")
LEARNED = "learned"
POLICY = "kvasir"
_OVERLOAD = 1.5
_LOADS = (0.5, 0.75, 0.9, 1.0, PAST_KNEE, _OVERLOAD)
"""Multiples of the peer's rate."""
_FIGURES = {
    "k_rate_vs_vllm": "rate_per_s",
    "k_slo_vs_vllm": "slo",
    "k_wait_p999_vs_vllm": "wait_s_p999",
    "k_tok_s_vs_vllm": "tokens_per_s",
    "k_slo_overload_vs_vllm": "slo_overload",
    "k_wait_p999_overload_vs_vllm": "wait_s_p999_overload",
}
_SHOWN = ("rate", "SLO", "p99.9 wait", "tokens/s", f"SLO at {_OVERLOAD} x", "p99.9 wait there")
_LEAST = 1e-6
_LARGE = Machine(capacity_blocks=5120)
"""For traces with prompts larger than a standard worker's KV."""


def machine_for(source: Source) -> Machine:
    """Return the paper's machine, or a larger one of the same speed (mooncake: prompts up to 126,195
    tokens)."""
    return _LARGE if longest_tokens(source) > _STANDARD_TOKENS else Machine()


_STANDARD_TOKENS = Machine().block_tokens * Machine().capacity_blocks


def predictors_for(source: Source) -> tuple[str, ...]:
    return (PREDICTORS[0], LEARNED, *PREDICTORS[1:]) if has_predictions(source) else PREDICTORS


@dataclass(frozen=True, slots=True)
class SeedQuestion:
    """One trace and seed: every predictor against the peer."""

    source: Source
    seed: int
    requests: int
    machine: Machine
    reference: Reference
    tolerance: float
    predictors: tuple[str, ...]


Answers = dict[str, dict[str, float]]
"""By predictor and `PEER`: `rate_per_s`, `sim.summary` at 1.2 times the peer's rate, and at `_OVERLOAD`."""


def answer_seed(question: SeedQuestion) -> Answers:
    """Measure one seed. The peer is the better of chunked and whole prompts."""
    peers = [_case(question, PEER, "none", chunked=chunked) for chunked in (True, False)]
    rates = [_knee(question, case) for case in peers]
    best = max(range(2), key=rates.__getitem__)
    sides = {PEER: peers[best]} | {name: _case(question, POLICY, name) for name in question.predictors}
    answers: Answers = {}
    calm: dict[str, list[float]] = {}
    for name, case in sides.items():
        rate = rates[best] if name == PEER else _knee(question, case)
        served = case if name == PEER else replace(case, refuse_wait_s=REFUSE_WAIT_S)
        knee = RateQuestion(name, served, rates[best], question.reference.level, (question.seed,))
        found = {load: answer_rate(replace(knee, rate_per_s=load * rates[best])) for load in _LOADS}
        late = {f"{key}_overload": value for key, value in found[_OVERLOAD].items()}
        calm[name] = [found[load]["slo"] for load in _LOADS if load <= 1.0]
        least = min(map(truediv, calm[name], calm[PEER]))
        answers[name] = {"rate_per_s": rate, "slo_below_knee": least, **found[PAST_KNEE], **late}
    return answers


def _case(question: SeedQuestion, policy: str, predictor: str, *, chunked: bool = True) -> Case:
    return Case(
        question.source,
        policy,
        predictor,
        question.machine,
        requests=question.requests,
        seed=question.seed,
        chunked_prefill=chunked,
    )


def _knee(question: SeedQuestion, case: Case) -> float:
    reference = question.reference
    return answer_knee(
        KneeQuestion(
            case.policy,
            case,
            reference.limit_s,
            reference.capacity_per_s,
            (question.seed,),
            tolerance=question.tolerance,
        )
    )


def measure_headline(
    sources: Sequence[Source], effort: Effort, tell: Callable[[str], None]
) -> dict[tuple[str, int], Answers]:
    """Return the answers by trace and seed."""
    first = [
        Case(source, PEER, "none", machine_for(source), requests=effort.requests, seed=effort.seeds[0])
        for source in sources
    ]
    rough = sweep(measure_reference, first, processes=effort.processes)
    counts = [max(effort.requests, round(effort.duration_s * one.capacity_per_s)) for one in rough]
    cases = [replace(case, requests=count) for case, count in zip(first, counts, strict=True)]
    references = sweep(measure_reference, cases, processes=effort.processes)
    questions = [
        SeedQuestion(
            source, seed, count, machine_for(source), reference, effort.tolerance, predictors_for(source)
        )
        for source, reference, count in zip(sources, references, counts, strict=True)
        for seed in effort.seeds
    ]
    answers = sweep(
        answer_seed,
        questions,
        processes=effort.processes,
        on_result=lambda done, _: tell(f"{done.source.name}, seed {done.seed}"),
    )
    return {(one.source.name, one.seed): answer for one, answer in zip(questions, answers, strict=True)}


def headline_figures(found: dict[tuple[str, int], Answers]) -> tuple[dict[str, float], list[Table]]:
    """Return `k_rate_vs_vllm_TRACE_PREDICTOR` and the like, with `…_low` and `…_high`, and a table per
    trace."""
    figures: dict[str, float] = {}
    tables = []
    for trace in dict.fromkeys(trace for trace, _ in found):
        seeds = [answers for (name, _), answers in found.items() if name == trace]
        rows = []
        for predictor in (name for name in seeds[0] if name != PEER):
            row: list[object] = [predictor]
            for figure, name in _FIGURES.items():
                ours = [max(_LEAST, answers[predictor][name]) for answers in seeds]
                theirs = [max(_LEAST, answers[PEER][name]) for answers in seeds]
                low, high = interval(ours, theirs, median_of_ratios)
                key = f"{figure}_{trace}_{predictor}"
                figures |= {key: median_of_ratios(ours, theirs), f"{key}_low": low, f"{key}_high": high}
                row.append(f"{figures[key]:.2f} ({low:.2f} to {high:.2f})")
            end = f"{trace}_{predictor}"
            below = min(each[predictor]["slo_below_knee"] for each in seeds)
            figures[f"k_slo_below_knee_vs_vllm_least_{end}"] = below
            for name in ("refused", "refused_overload"):
                figures[f"k_{name}_{end}"] = mean(each[predictor][name] for each in seeds)
            rows.append(tuple(row))
        title = f"{trace} (simulated), {len(seeds)} seeds: kvasir over vllm at {PAST_KNEE} x"
        tables.append(Table(title, ("predictor", *_SHOWN), rows))
    return figures, tables
