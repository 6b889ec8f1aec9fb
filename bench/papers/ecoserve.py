"""Claims of EcoServe (papers/003 §2 and §4): OPT-13B on one A100 with 12 GB of KV, simulated."""

from dataclasses import replace
from functools import partial
from itertools import product

from bench.kit.datasets import data_folder
from bench.papers.claims import TODAY, Claim, Effort, Figures, Rule, Study
from bench.simulated.ecoserve.comparison import PAST_KNEE
from bench.simulated.ecoserve.measures import (
    KneeQuestion,
    RateQuestion,
    answer_knee,
    answer_rate,
    measure_reference,
)
from bench.simulated.ecoserve.sides import PolicySide, case_of
from sim.case import Case, Machine
from sim.sweep import sweep
from sim.workloads import find_source

_PREDICTOR = "sigma0.25"
"""The paper's trained model: 22 to 30 % of its padded predictions are too short."""
_LEAST = 1e-3
_TABLE_2 = {"sharegpt": 28.0, "alpaca": 36.0}
"""Requests per second in the paper's table 2, by trace."""
_SIDES = (
    "vllm", "vllm chunked", "fastgen chunked", "orca", "orca maximum", "ecoserve", "ecoserve oracle",
    "ecoserve_profile",
)  # fmt: skip
"""Policy and variant: `maximum` drops ORCA's batch limit, so only its reserved memory differs from vLLM."""


def _case(label: str, trace: str, requests: int, effort: Effort) -> Case:
    policy, _, option = label.partition(" ")
    known = "oracle" if option == "oracle" else _PREDICTOR if policy.startswith("ecoserve") else "none"
    side = PolicySide(label, policy, known, chunked_prefill=option == "chunked")
    case = case_of(side, find_source(trace, data_folder()), Machine(), requests=requests, seed=effort.seed)
    return replace(case, batch_sequences=Machine().max_batch_sequences) if option == "maximum" else case


def rates(trace: str, effort: Effort) -> Figures:
    """Search each side's sustained rate, then compare all at 1.2 times vLLM's and at the paper's arrivals."""
    requests = effort.pick(600, 200)
    cases = {label: _case(label, trace, requests, effort) for label in _SIDES}
    reference = measure_reference(cases["vllm"])
    seeds = tuple(range(effort.seed, effort.seed + effort.pick(2, 1)))
    asked = [
        KneeQuestion(label, case, reference.limit_s, reference.capacity_per_s, seeds, tolerance=0.1)
        for label, case in cases.items()
    ]
    knees = dict(zip(cases, (max(_LEAST, knee) for knee in sweep(answer_knee, asked)), strict=True))
    at = PAST_KNEE * knees["vllm"]
    later = [
        RateQuestion(label, case, rate, reference.level, seeds)
        for rate in (at, _TABLE_2[trace])
        for label, case in cases.items()
    ]
    few = replace(cases["vllm"], machine=Machine(capacity_blocks=Machine().capacity_blocks // 5))
    later.append(RateQuestion("a fifth", few, _TABLE_2[trace], reference.level, seeds))
    answers = sweep(answer_rate, later)
    count = len(cases)
    past, flooded = (dict(zip(cases, part, strict=True)) for part in (answers[:count], answers[count:-1]))
    ours = knees["ecoserve"]
    figures: dict[str, float] = {}
    rivals = {"vllm": "vllm", "vllm_maximum": "orca maximum", "fastgen": "fastgen chunked", "orca": "orca"}
    for name, rival in (*rivals.items(), ("today", "vllm chunked")):
        figures |= {f"rate_{name}": ours / knees[rival]}
        figures |= {f"rate_{name}_profile": knees["ecoserve_profile"] / knees[rival]}
        for suffix, runs in (("", past), ("_table2", flooded)):
            mine, other = runs["ecoserve"], runs[rival]
            figures[f"slo_{name}{suffix}"] = max(_LEAST, mine["slo"]) / max(_LEAST, other["slo"])
            figures[f"jct_{name}{suffix}"] = mine["jct_s"] / other["jct_s"]
            figures[f"throughput_{name}{suffix}"] = mine["tokens_per_s"] / other["tokens_per_s"]
    figures |= {
        "oracle": knees["ecoserve oracle"] / ours,
        "failures": past["ecoserve"]["alloc_failures"],
        "failures_vllm": past["vllm"]["alloc_failures"],
        "failures_vllm_fifth": answers[-1]["alloc_failures"],
        "failures_vllm_table2": flooded["vllm"]["alloc_failures"],
        "kvc": past["ecoserve"]["kvc_utilization"],
        "kvc_profile": past["ecoserve_profile"]["kvc_utilization"],
    }
    against_today = {
        f"{kind}_{name}_{trace}{TODAY}": figures[f"{kind}_today"]
        for kind, name in product(("rate", "slo", "jct", "throughput"), ("vllm", "fastgen", "orca"))
    }
    return {f"{name}_{trace}": value for name, value in figures.items()} | against_today


_TODAY = "vLLM"


def _turns(figure: str, trace: str) -> tuple[tuple[str, str], ...]:
    """Return the changes of the set-up that may explain a figure against vLLM."""
    kind = figure.partition("_")[0]
    maximum = ("memory reserved", f"{kind}_vllm_maximum_{trace}")
    orca = ("memory reserved, batches of 8", f"{kind}_orca_{trace}")
    second = f"{figure}_profile_{trace}" if kind == "rate" else f"{figure}_table2_{trace}"
    change = "answers admitted by profile" if kind == "rate" else "the arrivals of table 2"
    return (() if figure.endswith("orca") else (maximum, orca)) + ((change, second),)


def _claims(trace: str) -> tuple[Claim, ...]:
    ratios = (
        ("rate_vllm", "rate sustained, of vLLM's", "§4, OPT-13B", (1.28, 2.33)),
        ("rate_fastgen", "rate sustained, of FastGen's", "§4, OPT-13B", (1.2, 2.33)),
        ("rate_orca", "rate sustained, of ORCA's", "§4, OPT-13B", (3.5, 25.0)),
        ("slo_vllm", "requests in their SLO, of vLLM's", "fig. 10", (1.83, 1.83)),
        ("slo_orca", "requests in their SLO, of ORCA's", "fig. 10", (1.93, 1.93)),
        ("jct_vllm", "job completion time, of vLLM's", "fig. 11", (0.36, 0.09)),
        ("throughput_vllm", "throughput, of vLLM's", "fig. 11", (2.67, 2.96)),
    )
    made = [
        Claim(f"{name}_{trace}", f"{trace}: {what}", source, span, today=_TODAY, turns=_turns(name, trace))
        for name, what, source, span in ratios
    ]
    oracle = Claim(f"oracle_{trace}", f"{trace}: rate with true lengths", "§4", (1.08, 1.08), Rule.MOST)
    failed = Claim(
        f"failures_{trace}", f"{trace}: requests whose allocation fails", "table 1", (0.05, 0.05), Rule.MOST
    )
    theirs = Claim(
        f"failures_vllm_{trace}",
        f"{trace}: the same under vLLM",
        "fig. 1d",
        (0.74, 0.74),
        Rule.LEAST,
        turns=(
            ("the arrivals of table 2", f"failures_vllm_table2_{trace}"),
            ("those and a fifth of the memory", f"failures_vllm_fifth_{trace}"),
        ),
    )
    used = Claim(
        f"kvc_{trace}",
        f"{trace}: KV memory that is filled",
        "§2.2",
        (0.63, 0.63),
        Rule.LEAST,
        turns=(("answers admitted by profile", f"kvc_profile_{trace}"),),
    )
    return (*made, oracle, failed, theirs, used)


def _study(trace: str) -> Study:
    return Study(
        "ecoserve",
        f"ecoserve-{trace}",
        f"{trace}, Poisson arrivals, whole prompts, predicted lengths; equal normalized latency; the rest at "
        f"{PAST_KNEE} times vLLM's rate; simulated",
        partial(rates, trace),
        _claims(trace),
        has_quick=trace == "sharegpt",
    )


STUDIES = tuple(_study(trace) for trace in _TABLE_2)
