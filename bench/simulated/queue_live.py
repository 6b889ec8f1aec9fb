"""The live half of `bench fleet --queue --live`: the queue by work against first come, on a stack.

Workers take a model's time but compute nothing (`--engine simulated`), so lengths and costs match the
simulator. The difference is the real gateway, bus, scheduler, placement and predictor, with late heartbeats
and late predictions. Service level and rate (1.2 times the knee of one worker under `vllm`) come from the
simulator. The same requests also run through it on both sides.
"""

import csv
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import uvloop

from bench.kit.context import Context
from bench.kit.datasets import data_folder
from bench.kit.load import Answer, LoadResult, complete_all, full_answer, serve_all
from bench.kit.models import TINY_CHAT, drawn_tokens, vocabulary
from bench.kit.outcome import Outcome, Table
from bench.kit.stacks import Stack, start_stack
from bench.kit.stats import percentile
from bench.simulated.ecoserve.measures import KneeQuestion, Reference, answer_knee, measure_reference
from services.scheduler.policy.contract import QueueOrder
from services.scheduler.policy.fleet_queue import FEED_SEQUENCES
from services.worker.engine.simulated import answer_tokens
from shared.errors import InternalError
from sim.case import Case, Machine, requests_of, run_case
from sim.requests import SimRequest
from sim.summary import ServiceLevel
from sim.workloads import Source, find_source, poisson_requests

PAST_KNEE = 1.2
SIDES = {"by work": (QueueOrder.WORK, FEED_SEQUENCES), "first come": (QueueOrder.ARRIVAL, 0)}
MACHINE = Machine(block_tokens=16, capacity_blocks=320, token_budget=512, max_batch_sequences=64, max_steps=8)
"""A third of the simulated sides' KV, so that two cores can carry the fleet's tokens to the client."""
MAX_TOKENS = 1024
_ROWS = 3000
_WARM_UP = 128
"""Warm-up answers for the predictor."""
_SHOWN = {
    "SLO": "slo",
    "s/token": "normalized_s",
    "first token mean s": "wait_s",
    "p50": "wait_s_p50",
    "p99": "wait_s_p99",
    "tokens/s": "tokens_per_s",
}


@dataclass(frozen=True, slots=True)
class Served:
    """Result of one request, live or simulated, in seconds of the cost model from its arrival."""

    first_s: float
    whole_s: float
    tokens: int


def run(context: Context, counts: Sequence[int], duration_s: float) -> Outcome:
    """Run each side with each number of workers. Raises InternalError if a stack does not serve."""
    folder = context.run_dir.resolve()
    source = write_trace(folder / "lengths.csv", context.random("lengths"))
    context.say("what one such worker sustains under vllm")
    reference, knee = peer(source, 500 if context.quick else 1000)
    speed = context.arguments.live_speed
    figures: dict[str, float] = {}
    rows: list[Sequence[object]] = []
    failures = 0
    for workers in counts:
        found: dict[tuple[str, str], dict[str, float]] = {}
        for side in SIDES:
            case = case_of(side, source, workers, PAST_KNEE * knee * workers, duration_s, context.seed)
            context.say(f"{case.requests} requests, {workers} live workers, {side}")
            answers, span_s = live(folder / f"{workers}-{side.replace(' ', '-')}", case, side, speed)
            served = [one for one in answers if one is not None]
            failures += len(answers) - len(served)
            found[side, "live"] = measured(served, span_s, reference.level)
            found[side, "simulated"] = measured(*simulated(case), reference.level)
            for where in ("live", "simulated"):
                told = found[side, where]
                context.record({"side": side, "workers": workers, "where": where, **told}, "cells.jsonl")
                rows.append((workers, side, where, *(f"{told[name]:.3g}" for name in _SHOWN.values())))
        figures |= _figures(found, workers)
    for name in ("live_queue_slo_ratio", "live_queue_wait_ratio", "live_queue_wait_p99_ratio"):
        figures[name] = fmean(figures[f"{name}_w{count}"] for count in counts)
    title = f"ShareGPT's prompts, {PAST_KNEE} x {knee:.2f} requests/s for each worker, engine `simulated`"
    notes = [
        f"live: policy kvasir, a histogram that learns as it goes, {duration_s:g} s of arrivals, "
        f"speed {speed:g}",
        "service level and rate come from the simulator; the simulated rows have the same requests",
    ]
    return Outcome(figures, failures, [Table(title, ("workers", "queue", "", *_SHOWN), rows)], notes)


def write_trace(file: Path, dice: Random) -> Source:
    """Write ShareGPT's prompts with the engine's answer lengths."""
    prompts = poisson_requests(
        find_source("sharegpt", data_folder()), count=_ROWS, rate_per_s=1.0, seed=dice.randrange(1 << 30)
    )
    with file.open("w", newline="") as out:
        rows = csv.writer(out)
        rows.writerow(("prompt_tokens", "output_tokens"))
        for seed, request in enumerate(prompts):
            rows.writerow((request.prompt_tokens, min(MAX_TOKENS, answer_tokens(seed, 0))))
    return Source(path=file, max_tokens=MAX_TOKENS)


@lru_cache(maxsize=1)
def _seeds() -> dict[int, int]:
    """Return a seed for each answer length, limited to `MAX_TOKENS`."""
    return {min(MAX_TOKENS, answer_tokens(seed, 0)): seed for seed in range(_ROWS)}


def peer(source: Source, requests: int) -> tuple[Reference, float]:
    """Return the reference, and the simulated rate that one worker sustains under `vllm`."""
    case = Case(source, "vllm", "none", machine=MACHINE, requests=requests)
    reference = measure_reference(case)
    question = KneeQuestion("vllm", case, reference.limit_s, reference.capacity_per_s, (0,))
    return reference, answer_knee(question)


def case_of(side: str, source: Source, workers: int, rate: float, duration_s: float, seed: int) -> Case:
    """Return the simulator's case of one side."""
    order, places = SIDES[side]
    return Case(
        source,
        "kvasir",
        "histogram_online",
        machine=MACHINE,
        rate_per_s=rate,
        requests=round(rate * duration_s),
        seed=seed,
        workers=workers,
        placement="worst_fit",
        queue=order,
        places=places,
    )


def simulated(case: Case) -> tuple[list[Served], float]:
    """Return the simulated requests and the seconds from the first arrival to the last end."""
    records = run_case(case).records
    span_s = max(one.end_s for one in records) - min(one.request.arrival_s for one in records)
    served = [
        Served(one.first_token_s - one.request.arrival_s, one.jct_s, one.request.output_tokens)
        for one in records
    ]
    return served, span_s


def live(run_dir: Path, case: Case, side: str, speed: float) -> tuple[list[Served | None], float]:
    """Run the case on a stack, in seconds of the cost model, `speed` per real second. None is a failed
    request. Raises InternalError if no request succeeds."""
    order, places = SIDES[side]
    settings: dict[str, object] = {
        "worker.engine": "simulated",
        "worker.simulated.speed": speed,
        "worker.kv_blocks": MACHINE.capacity_blocks,
        "worker.block_tokens": MACHINE.block_tokens,
        "worker.prefix_cache.enabled": False,
        "scheduler.queue": order.value,
        "scheduler.feed_sequences": places,
        "scheduler.token_budget": MACHINE.token_budget,
        "scheduler.max_batch_sequences": MACHINE.max_batch_sequences,
        "scheduler.max_steps": MACHINE.max_steps,
        "placement.policy": "worst_fit",
    }
    requests = requests_of(case)
    dice = Random(f"{case.seed}/prompts")
    bodies = [_body(request, dice) for request in requests]
    due_s = [request.arrival_s / speed for request in requests]
    with start_stack(run_dir, settings, workers=case.workers, name=side) as stack:
        _teach(stack, dice)
        load = uvloop.run(serve_all(stack.target, bodies, len(bodies), due_s=due_s))
    if load.failures == len(load.answers):
        raise InternalError(f"no request was answered: {load.answers[0].error}")
    return _served(load, due_s, speed), load.elapsed_s * speed


def _teach(stack: Stack, dice: Random) -> None:
    """Train the predictor before the measurement."""
    seeds = dice.sample(range(_ROWS), _WARM_UP)
    bodies = [{**_asked(32, dice), "seed": seed} for seed in seeds]
    uvloop.run(complete_all(stack.target, bodies, 240.0))
    time.sleep(0.5)


def _body(request: SimRequest, dice: Random) -> dict[str, Any]:
    return {**_asked(request.prompt_tokens, dice), "seed": _seeds()[request.output_tokens]}


def _asked(prompt_tokens: int, dice: Random) -> dict[str, Any]:
    """Return the body of a request that ends with the model's end token."""
    body = full_answer(drawn_tokens(dice, vocabulary(TINY_CHAT), prompt_tokens), MAX_TOKENS)
    return {**body, "ignore_eos": False}


def _served(load: LoadResult, due_s: Sequence[float], speed: float) -> list[Served | None]:
    """Return the live results, with times from each request's due time."""
    begun_s = min(one.sent_s - due for one, due in zip(load.answers, due_s, strict=True))
    return [
        _seen(one, begun_s + due, speed) if one.ok and one.event_s else None
        for one, due in zip(load.answers, due_s, strict=True)
    ]


def _seen(answer: Answer, due_s: float, speed: float) -> Served:
    whole_s = speed * (answer.ended_s - due_s)
    return Served(speed * (answer.event_s[0] - due_s), whole_s, answer.completion_tokens)


def measured(served: Sequence[Served], span_s: float, level: ServiceLevel) -> dict[str, float]:
    """Return the figures of one side; `wait_s` is the time to the first token."""
    first_s = [one.first_s for one in served]
    return {
        "slo": fmean(one.whole_s <= level.limit_s(one.tokens) for one in served),
        "normalized_s": fmean(one.whole_s / one.tokens for one in served),
        "wait_s": fmean(first_s),
        "wait_s_p50": percentile(first_s, 50),
        "wait_s_p99": percentile(first_s, 99),
        "tokens_per_s": sum(one.tokens for one in served) / span_s,
    }


def _figures(found: dict[tuple[str, str], dict[str, float]], workers: int) -> dict[str, float]:
    """Return ratios of the queue by work to first come; `simulated_…` are the simulator's."""
    figures = {}
    names = {"slo_ratio": "slo", "wait_ratio": "wait_s", "wait_p99_ratio": "wait_s_p99"}
    for where in ("live", "simulated"):
        ours, theirs = (found[side, where] for side in SIDES)
        for figure, name in names.items():
            label = "live_queue" if where == "live" else "live_queue_simulated"
            figures[f"{label}_{figure}_w{workers}"] = ours[name] / max(theirs[name], 1e-9)
    return figures
