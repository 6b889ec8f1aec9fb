"""Claims of EcoServe (papers/003 §2 and §4): OPT-13B on one A100 with 12 GB of KV, simulated."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from statistics import mean

from bench.kit.datasets import data_folder
from bench.kit.stats import geometric_mean
from bench.papers.claims import TODAY, Claim, Effort, Figures, Picture, Rule, Study, points
from bench.simulated.ecoserve import sensitivity
from bench.simulated.ecoserve.comparison import CURVE, PAST_KNEE
from bench.simulated.ecoserve.measures import (
    KneeQuestion,
    RateQuestion,
    Reference,
    answer_knee,
    answer_rate,
    measure_reference,
)
from bench.simulated.ecoserve.sides import BEST, PolicySide, case_of
from services.scheduler.policy.research.ecoserve.planner import EcoServeD
from sim.case import Case, Machine
from sim.sweep import sweep
from sim.workloads import find_source

_PREDICTOR = "sigma0.25"
"""The paper's trained model: 22 to 30 % of its padded predictions are too short."""
_LEAST = 1e-3
_TABLE_2 = {"sharegpt": 28.0, "alpaca": 36.0, "books": 1.2}
"""Requests per second in the paper's table 2, by trace."""
_BEFORE_KNEE = 0.7
_LONGER = 4
"""A run of so many times the requests comes closer to the paper's hours."""
_WAITING = ("ecoserve_sd unbounded", "ecoserve_sdo unbounded")
_SOUGHT, _COMPARED_LONG = ("vllm", "ecoserve_sdo"), ("by profile", "ecoserve_sdo")
_LENGTHS = {"sharegpt": 1.0, "alpaca": 3.0, "books": 0.4}
"""Requests of a run, of sharegpt's: answers of alpaca are short, and its rates high."""
_SCHEDULING = {"ecoserve_d": 0.34, "ecoserve_sd": 0.0214}
"""Share of a request's time that batches formed request by request cost the paper, and those of groups
(§2.2)."""
_ADDED = {
    "ecoserve_sd": ("synced batches", 0.736, 1.15),
    "ecoserve_sdo": ("ordering", 0.868, 1.08),
    "ecoserve": ("KV pipelining", 0.37, 1.28),
}
"""The part that a variant adds to the one before, and the paper's ratios of completion time and throughput,
from its averages over traces and models."""
_SIDES = (
    "vllm", "vllm chunked", "fastgen chunked", "orca", "orca maximum", "ecoserve", "ecoserve oracle",
    "ecoserve_profile",
)  # fmt: skip
"""Policy and variant: `maximum` drops ORCA's batch limit, so only its reserved memory differs from vLLM."""
_ANY_BATCH, _LONGEST = ("maximum", "longest"), 4096
"""ORCA's variants without its batch limit; `longest` also reserves for answers of so many tokens."""
_OUTSIDE = {"ecoserve_sd": "UnboundedSD", "ecoserve_sdo": "UnboundedSDO"}
"""Classes below of variant `unbounded`."""
_FIG_12 = "ecoserve-fig12-"
_FIGURE_10 = ("vllm", "fastgen chunked", "orca", "ecoserve")
_SHOWN = {"completion time": "jct_s", "throughput": "tokens_per_s", "SLO": "slo"}
_PAST = (("orca", "ORCA"), ("srtf", "SRTF"), ("fastserve", "FastServe"))
_KNOWN = ("orca maximum", "orca", "srtf oracle", "fastserve", "vllm", "fastgen chunked", "multires oracle")
"""The policies of figure 1; those that use lengths know them."""


class UnboundedSD(EcoServeD):
    """`ecoserve_sd` whose prompts take all that the first waiting generation leaves (decision 0070)."""

    synced = True

    def _leaves_room(self, blocks: int) -> bool:
        head = self._ready.first()
        return blocks + (0 if head is None else self._lacking_blocks(head)) <= self._table.free_blocks


class UnboundedSDO(UnboundedSD):
    """The same of `ecoserve_sdo`."""

    ordered = True


def _case(label: str, trace: str, requests: int, effort: Effort) -> Case:
    policy, _, option = label.partition(" ")
    known = "oracle" if option == "oracle" else _PREDICTOR if policy.startswith("ecoserve") else "none"
    side = PolicySide(label, policy, known, chunked_prefill=option == "chunked")
    source = find_source(trace, data_folder())
    source = replace(source, max_tokens=_LONGEST) if option == "longest" else source
    case = case_of(side, source, Machine(), requests=requests, seed=effort.seed)
    case = replace(case, batch_sequences=Machine().max_batch_sequences) if option in _ANY_BATCH else case
    return replace(case, policy=f"{__file__}:{_OUTSIDE[policy]}") if option == "unbounded" else case


def _rows(
    cases: Mapping[str, Case], rate_per_s: float, reference: Reference, seeds: tuple[int, ...]
) -> dict[str, dict[str, float]]:
    asked = [RateQuestion(label, case, rate_per_s, reference.level, seeds) for label, case in cases.items()]
    return dict(zip(cases, sweep(answer_rate, asked), strict=True))


def rates(trace: str, effort: Effort) -> Figures:
    """Search each side's sustained rate, then compare all at 1.2 times vLLM's and at the paper's arrivals."""
    requests = round(effort.pick(600, 200) * _LENGTHS[trace])
    sides = (*_SIDES, *(("orca longest",) if trace == "books" else ()))
    cases = {label: _case(label, trace, requests, effort) for label in sides}
    reference = measure_reference(cases["vllm"])
    seeds = tuple(range(effort.seed, effort.seed + effort.pick(2, 1)))
    asked = [
        KneeQuestion(label, case, reference.limit_s, reference.capacity_per_s, seeds, tolerance=0.1)
        for label, case in cases.items()
    ]
    knees = dict(zip(cases, (max(_LEAST, knee) for knee in sweep(answer_knee, asked)), strict=True))
    past, flooded = (
        _rows(cases, rate, reference, seeds) for rate in (PAST_KNEE * knees["vllm"], _TABLE_2[trace])
    )
    ours = knees["ecoserve"]
    figures: dict[str, float] = {}
    rivals = {"vllm": "vllm", "vllm_maximum": "orca maximum", "fastgen": "fastgen chunked", "orca": "orca"}
    rivals |= {"vllm_longest": "orca longest"} if trace == "books" else {}
    for name, rival in (*rivals.items(), ("today", "vllm chunked")):
        figures |= {f"rate_{name}": ours / knees[rival]}
        figures |= {f"rate_{name}_profile": knees["ecoserve_profile"] / knees[rival]}
        for suffix, runs in (("", past), ("_table2", flooded)):
            mine, other = runs["ecoserve"], runs[rival]
            figures[f"slo_{name}{suffix}"] = max(_LEAST, mine["slo"]) / max(_LEAST, other["slo"])
            figures[f"jct_{name}{suffix}"] = mine["jct_s"] / other["jct_s"]
            figures[f"throughput_{name}{suffix}"] = mine["tokens_per_s"] / other["tokens_per_s"]
    figures |= {"oracle": knees["ecoserve oracle"] / ours, "failures": past["ecoserve"]["alloc_failures"]}
    against_today = {
        f"{kind}_{name}_{trace}{TODAY}": figures[f"{kind}_today"]
        for kind, name in product(("rate", "slo", "jct", "throughput"), ("vllm", "fastgen", "orca"))
    }
    found = {f"{name}_{trace}": value for name, value in figures.items()} | against_today
    found |= _figure1(trace, requests, effort, reference, seeds)
    return found if effort.quick else found | _drawn(trace, requests, effort, reference, knees)


def _of_vllm(rows: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return each side's completion time, throughput and requests in their SLO, of vLLM's."""
    return {
        label: {name: max(_LEAST, row[key]) / max(_LEAST, rows["vllm"][key]) for name, key in _SHOWN.items()}
        for label, row in rows.items()
    }


def _figure1(
    trace: str, requests: int, effort: Effort, reference: Reference, seeds: tuple[int, ...]
) -> dict[str, float]:
    """Compare the schedulers of figure 1 at the arrivals of table 2, with known lengths."""
    cases = {label: _case(label, trace, requests, effort) for label in (*_KNOWN, "orca longest")}
    rows = _rows(cases, _TABLE_2[trace], reference, seeds)
    shown = {label: rows[label] for label in _KNOWN}
    used = {"KV filled": {label: row["kvc_utilization"] for label, row in shown.items()}}
    found = points(f"ecoserve-fig1-{trace}", _of_vllm(shown)) | points(f"ecoserve-fig1e-{trace}", used)
    for label in ("orca", "srtf oracle", "fastserve"):
        ratio = rows[label]["tokens_per_s"] / rows["vllm"]["tokens_per_s"]
        found[f"fig1_{label.partition(' ')[0]}_{trace}"] = ratio
    for label in ("vllm", "fastgen chunked", "orca maximum", "orca longest"):
        name = f"fig1_multires_{label.replace(' ', '_').removesuffix('_chunked')}_{trace}"
        found[name] = rows["multires oracle"]["jct_s"] / rows[label]["jct_s"]
    return found


def _drawn(
    trace: str, requests: int, effort: Effort, reference: Reference, knees: Mapping[str, float]
) -> dict[str, float]:
    """Measure latency by rate (figure 10), and vary EcoServe's settings (figure 12)."""
    cases = {label: _case(label, trace, requests, effort) for label in _FIGURE_10}
    asked = [
        RateQuestion(label, case, factor * knees["vllm"], reference.level, (effort.seed,))
        for label, case in cases.items()
        for factor in CURVE[:6]
    ]
    curves: dict[str, dict[float, float]] = {}
    for question, answer in zip(asked, sweep(answer_rate, asked), strict=True):
        curves.setdefault(question.label, {})[question.rate_per_s] = answer["normalized_s"]
    found = points(f"ecoserve-fig10-{trace}", curves)
    for suffix, factor in (("", PAST_KNEE), ("_before", _BEFORE_KNEE)):
        rate = factor * knees["vllm"]
        ours = RateQuestion("ecoserve", cases["ecoserve"], rate, reference.level, (effort.seed,))
        for name, by_value in sensitivity.measure_sensitivities(ours).items():
            tops = {key: max(row[key] for row in by_value.values()) or 1.0 for key in _SHOWN.values()}
            curves = {
                kind + suffix.replace("_", " "): {x: row[key] / tops[key] for x, row in by_value.items()}
                for kind, key in _SHOWN.items()
            }
            found |= points(f"{_FIG_12}{name}-{trace}", curves)
            if name in BEST:
                least_s = min(row["jct_s"] for row in by_value.values())
                found[f"best_{name}{suffix}_{trace}"] = by_value[BEST[name][trace]]["jct_s"] / least_s
            elif not suffix:
                served = [by_value[scale]["slo"] for scale in (2.5, 0.5)]
                found[f"slo_scale_{trace}"] = served[0] / max(_LEAST, served[1])
    return found


def ablation(effort: Effort) -> Figures:
    """Add EcoServe's parts one by one, past vLLM's rate; return what each brings, a mean over the traces."""
    found: dict[str, float] = {}
    ratios, shares = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for trace in effort.pick(tuple(_TABLE_2), ("sharegpt", "alpaca")):
        requests = round(effort.pick(600, 300) * _LENGTHS[trace])
        cases = {label: _case(label, trace, requests, effort) for label in ("vllm", "ecoserve_d", *_ADDED)}
        cases |= {"by profile": _case("ecoserve_profile", trace, requests, effort)}
        peer, reference = cases["vllm"], measure_reference(cases["vllm"])
        start, seeds = reference.capacity_per_s, (effort.seed,)
        asked = [KneeQuestion(one, cases[one], reference.limit_s, start, seeds) for one in _SOUGHT]
        knee, own_knee = sweep(answer_knee, asked)
        longer = {one: replace(cases[one], requests=_LONGER * requests) for one in _COMPARED_LONG}
        cases |= {one: _case(one, trace, requests, effort) for one in _WAITING}
        for label, share in _SCHEDULING.items():
            cases[f"{label}, slow"] = replace(cases[label], machine=Machine(scheduling_share=share))
        past, late = (
            _rows(some, PAST_KNEE * rate, reference, seeds)
            for some, rate in ((cases, knee), (longer, own_knee))
        )
        compared = {
            **{more: (past[more], past[less]) for less, more in pairwise(("ecoserve_d", *_ADDED))},
            "ecoserve_sd_slow": (past["ecoserve_sd, slow"], past["ecoserve_d, slow"]),
            "ecoserve_sdo_unbounded": (past[_WAITING[1]], past[_WAITING[0]]),
            "ecoserve_profile": (past["by profile"], past["ecoserve_sdo"]),
            "ecoserve_profile_longer": (late["by profile"], late["ecoserve_sdo"]),
        }
        for name, (more_row, less_row) in compared.items():
            for kind, key in (("jct", "jct_s"), ("throughput", "tokens_per_s")):
                ratios[f"{kind}_{name}"].append(more_row[key] / less_row[key])
        few = replace(peer, machine=Machine(capacity_blocks=Machine().capacity_blocks // 5 + 1))
        flooded = _rows({"all": peer, "a fifth": few}, _TABLE_2[trace], reference, seeds)
        for name, value in {
            "failures_vllm": past["vllm"]["alloc_failures"],
            "failures_vllm_table2": flooded["all"]["alloc_failures"],
            "failures_vllm_fifth": flooded["a fifth"]["alloc_failures"],
            "failures_vllm_each": flooded["a fifth"]["evictions"] / requests,
            "kvc": past["ecoserve"]["kvc_utilization"],
            "kvc_profile": past["by profile"]["kvc_utilization"],
            "scheduling": past["ecoserve"]["planning_share"],
        }.items():
            shares[name].append(value)
        rows = {label: past[label] for label in ("vllm", "ecoserve_d", *_ADDED)}
        found |= points(f"ecoserve-fig11-{trace}", _of_vllm(rows))
    found |= {name: geometric_mean(values) for name, values in ratios.items()}
    return found | {name: mean(values) for name, values in shares.items()}


_EARLIER = f"a rate of {_BEFORE_KNEE} of vLLM's"
_TODAY, _ARRIVALS, _BY_PROFILE = "vLLM", "the arrivals of table 2", "answers admitted by profile"
_RESERVED = f"memory reserved for answers of {_LONGEST} tokens"


def _turns(figure: str, trace: str) -> tuple[tuple[str, str], ...]:
    """Return the changes of the set-up that may explain a figure against vLLM."""
    kind = figure.partition("_")[0]
    maximum = ("memory reserved", f"{kind}_vllm_maximum_{trace}")
    orca = ("memory reserved, batches of 8", f"{kind}_orca_{trace}")
    second = f"{figure}_profile_{trace}" if kind == "rate" else f"{figure}_table2_{trace}"
    change = _BY_PROFILE if kind == "rate" else _ARRIVALS
    longest = ((_RESERVED, f"{kind}_vllm_longest_{trace}"),) if trace == "books" else ()
    return (() if figure.endswith("orca") else (maximum, orca)) + ((change, second), *longest)


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
    for rival, ratio in (("vllm", 0.574), ("fastgen", 0.65)):
        said = f"{trace}: completion time of MultiRes, of {rival}'s"
        sides = ("memory reserved", "orca_maximum"), (_RESERVED, "orca_longest")
        tried = tuple((change, f"fig1_multires_{side}_{trace}") for change, side in sides)
        made.append(Claim(f"fig1_multires_{rival}_{trace}", said, "§2.2", (ratio, ratio), turns=tried))
    made.append(
        Claim(f"slo_scale_{trace}", f"{trace}: requests in an SLO of 2.5, of 0.5", "fig. 12a", (1.23, 1.23))
    )
    limits = (
        ("oracle", "rate with true lengths", "§4", 1.08, Rule.MOST, ()),
        ("failures", "requests whose allocation fails", "table 1", 0.05, Rule.MOST, ()),
        *(
            (f"fig1_{name}", f"throughput of {said}, of vLLM's", "fig. 1", 1, Rule.MOST, ())
            for name, said in _PAST
        ),
        *(
            (
                f"best_{name}",
                f"completion time, of the best {name}'s",
                "fig. 12",
                1,
                Rule.MOST,
                ((_EARLIER, f"best_{name}_before"),),
            )
            for name in BEST
        ),
    )
    for name, what, source, limit, rule, tried in limits:
        turns = tuple((change, f"{figure}_{trace}") for change, figure in tried)
        span = (limit, limit)
        made.append(Claim(f"{name}_{trace}", f"{trace}: {what}", source, span, rule, turns=turns))
    return tuple(made)


def _study(trace: str) -> Study:
    return Study(
        "ecoserve",
        f"ecoserve-{trace}",
        f"{trace}, Poisson arrivals, whole prompts, predicted lengths; equal normalized latency; the rest at "
        f"{PAST_KNEE} times vLLM's rate; simulated",
        partial(rates, trace),
        _claims(trace),
        has_quick=trace == "sharegpt",
        pictures=(
            Picture(f"ecoserve-fig1-{trace}", f"EcoServe, fig. 1, {trace}", "", "of vLLM's"),
            Picture(f"ecoserve-fig1e-{trace}", f"EcoServe, fig. 1e, {trace}", "", "share of KV"),
            Picture(f"ecoserve-fig10-{trace}", f"EcoServe, fig. 10, {trace}", "requests/s", "s per token"),
            *(
                Picture(f"{_FIG_12}{name}-{trace}", f"EcoServe, fig. 12, {trace}", name, "of the largest")
                for name in sensitivity.VALUES
            ),
        ),
    )


def _ablated() -> tuple[Claim, ...]:
    longer = f"{_BY_PROFILE}, {PAST_KNEE} times the rate without it, {_LONGER} times as many requests"
    turns = {
        "ecoserve_sd": (("the scheduling times of §2.2", "_slow"),),
        "ecoserve_sdo": (("prompts that take all that the first waiting answer leaves", "_unbounded"),),
        "ecoserve": ((_BY_PROFILE, "_profile"), (longer, "_profile_longer")),
    }
    made = [
        Claim(
            f"{kind}_{more}",
            f"{said}, of without {what}",
            "fig. 11",
            (ratio, ratio),
            turns=tuple((change, f"{kind}_{more}{suffix}") for change, suffix in turns.get(more, ())),
        )
        for more, (what, *effects) in _ADDED.items()
        for (kind, said), ratio in zip(
            (("jct", "job completion time"), ("throughput", "throughput")), effects, strict=True
        )
    ]
    of_vllm = (
        (_ARRIVALS, "failures_vllm_table2"),
        (f"{_ARRIVALS} and a fifth of the memory", "failures_vllm_fifth"),
        (f"{_ARRIVALS}, a fifth of the memory, each failure of a request counted", "failures_vllm_each"),
    )
    by_profile = ((_BY_PROFILE, "kvc_profile"),)
    failing = "requests whose allocation fails under vLLM"
    return (
        *made,
        Claim("scheduling", "scheduling time, of the steps'", "§2.3", (0.0214, 0.0214), Rule.MOST),
        Claim("failures_vllm", failing, "fig. 1d", (0.74, 0.74), Rule.LEAST, turns=of_vllm),
        Claim("kvc", "KV memory that is filled", "§2.2", (0.63, 0.63), Rule.LEAST, turns=by_profile),
    )


STUDIES = (
    *(_study(trace) for trace in _TABLE_2),
    Study(
        "ecoserve",
        "ecoserve-ablation",
        f"means over the traces, at {PAST_KNEE} times vLLM's rate; simulated, where scheduling takes no time",
        ablation,
        _ablated(),
        pictures=tuple(
            Picture(f"ecoserve-fig11-{trace}", f"EcoServe, fig. 11, {trace}", "", "of vLLM's")
            for trace in _TABLE_2
        ),
    ),
)
