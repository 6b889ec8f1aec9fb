"""`python -m bench fleet-scale`: processor time of the control plane, by the number of workers.

Simulated workers take seconds for a step, so that two cores carry the steps of a whole fleet; everything else
is real: processes, bus, gateway and HTTP streams. The load grows with the fleet: each worker gets `ROWS`
answers at once. `growth` is the largest exponent of a process's cost in the number of workers.
"""

import asyncio
import re
import signal
import time
import urllib.request
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import orjson
import psutil
import uvloop

from bench.kit.context import Context
from bench.kit.load import Answer, LoadResult, first_error, serve_all
from bench.kit.models import TINY_CHAT, drawn_tokens, vocabulary
from bench.kit.outcome import Outcome, Table
from bench.kit.plots import Chart, draw_lines
from bench.kit.stacks import ONE_THREAD, Stack, start_stack
from bench.kit.stats import exponent
from bench.simulated.fleet_size import simulate
from services.gateway.text.tokenizer import Codec, load_codec
from services.worker.engine.simulated import token_at
from shared.config import ENV_PREFIX
from shared.errors import ConfigError, InternalError
from shared.messages.sequence import Sampling

KINDS = ("gateway", "scheduler", "predictor", "placement", "ledger", "nats", "worker", "supervisor")
CONTROL = KINDS[:6]
ROWS, PROMPT_TOKENS = 4, 24
_DECODE_S = 0.0237
"""Seconds of a decode step of `ROWS` sequences by the default cost model."""
_SHADOW_FROM_S = 0.2
"""Default of `scheduler.shadow_from_s`, which is scaled like the steps: else every answer has a shadow."""
_SILENT_STEPS = 3
"""After so many steps without a token a gateway asks for an answer again."""
_SETTLE_S = 4.0
_TICK_S = 0.01
"""Resolution of processor times in /proc."""
_KILL_EVERY_S = 6.0
_VICTIMS = ("scheduler-0", "placement-0", "ledger-0", "nats", "worker")
_TOGETHER = 16
"""Workers in one process; with more, their threads contend for its interpreter."""
_KILLED_SHARE = 0.1
"""Of the workers, with `--kills`, in whole processes."""
_STEPS = re.compile(r"^vllm:iteration_tokens_total_count\{.*\} ([0-9.e+]+)$", re.MULTILINE)


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--workers", type=int, nargs="+", help="[10 50 100 250, quick: 8 24; --kills 256]")
    add("--step-s", type=float, help="of a decode step [2, quick: 1]")
    add("--heartbeat-s", type=float, default=1.0, help="of workers; timeouts are 8 to 12 [%(default)s]")
    add("--tokens", type=int, help="of an answer [12, quick: 6]")
    add("--seconds", type=float, help="that are measured, idle and loaded [30, quick: 8]")
    add("--schedulers", type=int, default=1, help="that share the fleet [%(default)s]")
    add("--settings", nargs="+", default=[], metavar="KEY=VALUE", help="of the stack")
    add("--simulate", metavar="WORKERSxREQUESTS", help="in the simulator instead, as 1000x1000000")
    add("--kills", action="store_true", help="kill services and a tenth of the workers: 0 lost, 0 changed?")


@dataclass(frozen=True)
class Plan:
    """A load. Durations in seconds."""

    step_s: float
    tokens: int
    seconds: float

    @property
    def answer_s(self) -> float:
        """Expected duration of an answer; the first step computes its prompt."""
        return self.step_s * (self.tokens + 2)


@dataclass
class Spent:
    """Processor seconds by kind of process over a time, and what was served in it."""

    cpu_s: Mapping[str, float]
    took_s: float
    steps: float = 0.0
    tokens: int = 0
    requests: int = 0
    busiest_s: float = 0.0
    """Processor seconds of the busiest scheduler."""


def carried_steps_s(idle: Spent, busy: Spent) -> float:
    """Return the steps a second at which the busiest scheduler would use a whole core."""
    rests = idle.busiest_s / idle.took_s
    return (1 - rests) / (busy.busiest_s / busy.took_s - rests) * busy.steps / busy.took_s


def run(context: Context) -> Outcome:
    """Run the bench. Raises ConfigError for wrong flags, InternalError if a stack does not start."""
    flags, quick = context.arguments, context.quick
    if flags.simulate:
        return simulate(context, flags.simulate)
    settings = dict(pair.partition("=")[::2] for pair in flags.settings)
    if not all(settings.values()):
        raise ConfigError("write settings as section.key=value", param="settings")
    plan = Plan(
        flags.step_s or (1.0 if quick else 2.0),
        flags.tokens or (6 if quick else 12),
        flags.seconds or (8.0 if quick else 30.0),
    )
    if flags.kills:
        return _kills(context, plan, settings, (flags.workers or [24 if quick else 256])[0])
    counts = sorted(flags.workers or ([8, 24] if quick else [10, 50, 100, 250]))
    idle: dict[int, Spent] = {}
    busy: dict[int, Spent] = {}
    lost = changed = 0
    fleets = [(workers, flags.schedulers) for workers in counts]
    fleets = [(counts[-1], 1), *fleets] if flags.schedulers == 2 else fleets
    carried: list[float] = []
    with context.progress("fleets", len(fleets)) as bar:
        for workers, schedulers in fleets:
            with _stack(context, plan, settings, workers, schedulers) as stack:
                idle[workers] = uvloop.run(_idle(stack, plan))
                busy[workers], result = uvloop.run(_loaded(context, stack, plan, workers))
            if not busy[workers].tokens or not busy[workers].steps:
                raise InternalError(f"{workers} workers served nothing: {first_error(result.answers)}")
            carried.append(carried_steps_s(idle[workers], busy[workers]))
            lost += sum(not answer.ok for answer in result.answers)
            changed += changed_answers(result.answers, plan.tokens)
            if error := first_error(result.answers):
                context.say(f"{workers} workers: {error}")
            for state, spent in (("idle", idle[workers]), ("busy", busy[workers])):
                told = {"workers": workers, "schedulers": schedulers, "state": state, **vars(spent)}
                context.record(told, "cells.jsonl")
            bar.advance(now=f"{workers} workers")
    figures = {"lost": float(lost), "changed": float(changed), f"carried_steps_s_w{counts[-1]}": carried[-1]}
    if len(fleets) > len(counts):
        figures["two_schedulers"] = carried[-1] / carried[0]
    return _outcome(context, idle, busy, figures)


def _stack(context: Context, plan: Plan, settings: Mapping[str, str], workers: int, schedulers: int) -> Stack:
    speed, beat_s = _DECODE_S / plan.step_s, context.arguments.heartbeat_s
    timeouts = {"scheduler": 8, "placement": 8, "ledger": 8, "gateway": 12}
    scaled = {
        "worker.simulated.speed": speed,
        "scheduler.shadow_from_s": _SHADOW_FROM_S / speed,
        "worker.heartbeat_s": beat_s,
        "gateway.frame_timeout_s": _SILENT_STEPS * plan.step_s,
        "gateway.admit_timeout_s": 40 * beat_s,  # as live: 10 s at 0.25 s
        **{f"{service}.worker_timeout_s": beats * beat_s for service, beats in timeouts.items()},
    }
    told = {"ENGINE": "simulated", "WORKERS_PER_PROCESS": _TOGETHER, "SCHEDULERS": schedulers}
    environ = {f"{ENV_PREFIX}STACK__{name}": str(value) for name, value in told.items()}
    run_dir = context.run_dir / f"stack-{workers}-{schedulers}"
    return start_stack(run_dir, {**scaled, **settings}, workers=workers, environ={**ONE_THREAD, **environ})


def _cpu_s(stack: Stack) -> dict[str, float]:
    """Return processor seconds so far, user and system, by name of the process."""
    pids = {"supervisor": stack.tree.processes()[0].pid, **stack.pids()}
    return {name: sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in pids.items()}


def _steps(stack: Stack) -> float:
    """Return the steps that all workers have run, as the gateway's metrics tell."""
    url = orjson.loads((stack.run_dir / "state.json").read_bytes())["operator_url"]
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        found = _STEPS.findall(answer.read().decode())
    if not found:
        raise InternalError("the gateway's metrics do not tell steps")
    return sum(map(float, found))


async def _idle(stack: Stack, plan: Plan) -> Spent:
    await asyncio.sleep(_SETTLE_S)
    return (await _window(stack, plan.seconds))[0]


async def _window(stack: Stack, seconds: float) -> tuple[Spent, float, float]:
    """Return the processor time of so many seconds, from now, and their begin and end."""
    steps = await asyncio.to_thread(_steps, stack)
    before, began_s = _cpu_s(stack), time.perf_counter()
    await asyncio.sleep(seconds)
    after, ended_s = _cpu_s(stack), time.perf_counter()
    steps = await asyncio.to_thread(_steps, stack) - steps
    used = {name: max(_TICK_S, cpu_s - before.get(name, 0.0)) for name, cpu_s in after.items()}
    of_kinds = [{name: used[name] for name in used if name.startswith(kind)} for kind in KINDS]
    sums = {kind: sum(of_kind.values()) for kind, of_kind in zip(KINDS, of_kinds, strict=True) if of_kind}
    busiest_s = max(of_kinds[KINDS.index("scheduler")].values())
    return Spent(sums, ended_s - began_s, steps, busiest_s=busiest_s), began_s, ended_s


def _bodies(context: Context, plan: Plan, count: int) -> list[dict[str, Any]]:
    """Return requests whose answers have all their tokens, each with a seed of its own: its number."""
    ids, dice = vocabulary(TINY_CHAT), context.random("prompts")
    return [
        {
            "prompt": drawn_tokens(dice, ids, PROMPT_TOKENS),
            "max_tokens": plan.tokens,
            "min_tokens": plan.tokens,
            "seed": seed,
        }
        for seed in range(count)
    ]


async def _served(context: Context, stack: Stack, plan: Plan, workers: int, seconds: float) -> LoadResult:
    """Send requests at an even rate for so long, at which each worker has `ROWS` answers at once."""
    rate = ROWS * workers / plan.answer_s
    count = max(1, round(rate * seconds))
    due_s = [at / rate for at in range(count)]
    return await serve_all(stack.target, _bodies(context, plan, count), count, due_s=due_s)


async def _loaded(context: Context, stack: Stack, plan: Plan, workers: int) -> tuple[Spent, LoadResult]:
    warm_s = plan.answer_s + plan.step_s
    serving = asyncio.create_task(_served(context, stack, plan, workers, warm_s + plan.seconds + plan.step_s))
    await asyncio.sleep(warm_s)
    spent, began_s, ended_s = await _window(stack, plan.seconds)
    result = await serving
    times = [at_s for answer in result.answers for at_s in answer.event_s]
    spent.tokens = sum(began_s <= at_s < ended_s for at_s in times)
    spent.requests = sum(began_s <= answer.ended_s < ended_s for answer in result.answers)
    return spent, result


@cache
def _codec() -> Codec:
    return load_codec(str(TINY_CHAT))


def expected_text(seed: int, tokens: int) -> str:
    """Return the simulated engine's answer of so many tokens."""
    codec = _codec()
    sampling = Sampling(max_tokens=tokens, min_tokens=tokens, seed=seed, end_token_ids=codec.end_token_ids)
    found = [token_at(sampling, 0, index, codec.vocab_size) for index in range(tokens)]
    return str(codec.tokenizer.decode(found))


def changed_answers(answers: Sequence[Answer], tokens: int) -> int:
    """Return the number of complete answers, in the order of their seeds, with another text."""
    return sum(
        answer.ok and answer.text != expected_text(seed, tokens) for seed, answer in enumerate(answers)
    )


def growth(costs: Mapping[str, Mapping[float, float]]) -> dict[str, float]:
    """Return the exponent of each cost in the number of workers; none for costs within the resolution."""
    return {
        name: exponent(by_workers)
        for name, by_workers in costs.items()
        if len(by_workers) > 1 and by_workers[max(by_workers)] > 10 * _TICK_S
    }


def _outcome(
    context: Context, idle: Mapping[int, Spent], busy: Mapping[int, Spent], checks: Mapping[str, float]
) -> Outcome:
    counts, most = list(idle), max(idle)
    totals: dict[str, dict[float, float]] = {
        f"{state} {kind}": {workers: spent[workers].cpu_s[kind] for workers in counts}
        for state, spent in (("idle", idle), ("busy", busy))
        for kind in KINDS
    }
    exponents = growth(totals)
    figures = dict(checks)
    for workers in counts:
        spent = busy[workers]
        control_s = sum(spent.cpu_s[kind] for kind in CONTROL)
        figures[f"scheduler_us_per_step_w{workers}"] = spent.cpu_s["scheduler"] / spent.steps * 1e6
        figures[f"control_us_per_token_w{workers}"] = control_s / spent.tokens * 1e6
        figures[f"idle_us_per_worker_s_w{workers}"] = _per_worker_s(idle[workers], workers, KINDS)
    if exponents:
        figures["growth"] = max(exponents.values())
    rows = [
        (
            kind,
            *(round(_per_worker_s(idle[workers], workers, [kind])) for workers in counts),
            *(round(busy[workers].cpu_s[kind] / busy[workers].steps * 1e6) for workers in counts),
            *(
                f"{exponents[name]:.2f}" if (name := f"{state} {kind}") in exponents else "–"
                for state in ("idle", "busy")
            ),
        )
        for kind in KINDS
    ]
    heads = [f"{state} {workers}" for state in ("idle", "step") for workers in counts]
    served = [
        (
            workers,
            busy[workers].steps / busy[workers].took_s,
            busy[workers].tokens / busy[workers].took_s,
            busy[workers].requests,
            sum(busy[workers].cpu_s.values()) / busy[workers].took_s,
            sum(busy[workers].cpu_s[kind] for kind in CONTROL) / busy[workers].requests * 1e3,
        )
        for workers in counts
    ]
    _draw(context, idle, busy)
    return Outcome(
        figures,
        int(checks["lost"] + checks["changed"]),
        [
            Table(
                "processor time, µs: idle, for a worker and second; loaded, for a step",
                ("process", *heads, "growth idle", "growth loaded"),
                rows,
            ),
            Table(
                "load", ("workers", "steps/s", "tokens/s", "requests", "cores", "control ms/request"), served
            ),
        ],
        notes=[f"{ROWS} answers at once for each worker; growth: exponent of the whole cost in workers"],
        headline=[f"scheduler_us_per_step_w{most}", f"control_us_per_token_w{most}", "growth"],
    )


def _per_worker_s(spent: Spent, workers: int, kinds: Sequence[str]) -> float:
    return sum(spent.cpu_s[kind] for kind in kinds) / spent.took_s / workers * 1e6


def _draw(context: Context, idle: Mapping[int, Spent], busy: Mapping[int, Spent]) -> None:
    charts = [
        Chart(
            {kind: [(n, one.cpu_s[kind] / one.took_s) for n, one in spent.items()] for kind in KINDS},
            title=title,
            xlabel="workers",
            ylabel="cores",
            log_x=10,
            log_y=True,
        )
        for title, spent in (("idle", idle), (f"{ROWS} answers for each worker", busy))
    ]
    draw_lines(context.picture("fleet-scale"), *charts, beside=True)


def _kills(context: Context, plan: Plan, settings: Mapping[str, str], workers: int) -> Outcome:
    with _stack(context, plan, settings, workers, context.arguments.schedulers) as stack:
        time.sleep(_SETTLE_S)
        result = uvloop.run(_under_kills(context, stack, plan, workers))
        stack.until(stack.is_whole, 60.0)
    lost = sum(not answer.ok for answer in result.answers)
    changed = changed_answers(result.answers, plan.tokens)
    if error := first_error(result.answers):
        context.say(error)
    slowest_s = max(answer.ended_s - answer.sent_s for answer in result.answers)
    figures = {"requests": float(len(result.answers)), "lost": float(lost), "changed": float(changed)}
    figures |= {"slowest_s": slowest_s, "undisturbed_s": plan.answer_s}
    at_once = f"{_TOGETHER * _processes_killed(workers)} of {workers} workers at once"
    return Outcome(figures, lost + changed, notes=[f"killed: {', '.join(_VICTIMS)} ({at_once})"])


def _processes_killed(workers: int) -> int:
    return max(1, round(_KILLED_SHARE * workers / _TOGETHER))


async def _under_kills(context: Context, stack: Stack, plan: Plan, workers: int) -> LoadResult:
    seconds = plan.answer_s + _KILL_EVERY_S * len(_VICTIMS)
    serving = asyncio.create_task(_served(context, stack, plan, workers, seconds))
    await asyncio.sleep(plan.answer_s)
    for victim in _VICTIMS:
        names = [name for name in stack.pids() if name.startswith(victim)]
        for name in names[-_processes_killed(workers) :]:
            context.say(f"kills {name}")
            stack.process(name).send_signal(signal.SIGKILL)
        await asyncio.sleep(_KILL_EVERY_S)
    return await serving
