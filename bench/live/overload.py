"""`python -m bench overload`: three times as many requests as a stack can serve.

First it measures the stack's peak with enough concurrent requests to keep it full. Then requests arrive at
Poisson times at three times that rate.
"""

import asyncio
import hashlib
import itertools
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import uvloop

from bench.kit.context import Context
from bench.kit.load import Answer, Target, complete, serve_all
from bench.kit.models import TINY_CHAT, drawn_tokens, vocabulary
from bench.kit.outcome import Outcome, Table, joined
from bench.kit.stacks import start_stack
from bench.kit.stats import percentile
from shared.errors import InternalError
from sim.workloads import poisson_times

OVERLOAD = 3.0
WORKERS = 4
_AT_ONCE = 96
"""Concurrent requests per worker at the peak: more than a batch, without a long queue."""
_STEADY, _BUSY = 0.2, 0.7
"""Shares of the peak that the two keys send while neither floods."""
_DEADLINE_S = 240.0
_DRAWN = 4000
"""Number of requests drawn per purpose, more than are usually sent."""
_REFUSALS = ("status 429", "status 503")
ENGINES: Mapping[str, Mapping[str, object]] = {
    "simulated": {"worker.engine": "simulated"},
    "tiny_chat": {"worker.threads": 1},
}


@dataclass(frozen=True)
class Times:
    """Durations of each part, in seconds."""

    ramp_s: float = 20.0
    """Time for the queue to fill before the measurement."""
    window_s: float = 40.0


@dataclass(frozen=True)
class Part:
    """Requests of one part, and its window. Requests count if they are sent or end within it."""

    answers: Sequence[Answer]
    from_s: float
    to_s: float

    @property
    def ended(self) -> list[Answer]:
        """Requests completed within the window."""
        return [each for each in self.answers if each.ok and self.from_s <= each.ended_s < self.to_s]

    @property
    def sent(self) -> list[Answer]:
        return [each for each in self.answers if self.from_s <= each.sent_s < self.to_s]

    @property
    def window_s(self) -> float:
        return self.to_s - self.from_s

    @property
    def tokens_per_s(self) -> float:
        """Prompt and answer tokens of completed requests per second."""
        return sum(each.prompt_tokens + each.completion_tokens for each in self.ended) / self.window_s

    @property
    def requests_per_s(self) -> float:
        return len(self.ended) / self.window_s

    @property
    def refused(self) -> list[Answer]:
        return [each for each in self.answers if is_refused(each)]

    @property
    def failed(self) -> list[Answer]:
        """Requests neither completed nor refused."""
        return [each for each in self.answers if not each.ok and not is_refused(each)]


def is_refused(answer: Answer) -> bool:
    """Whether the request was refused for overload."""
    return answer.error.startswith(_REFUSALS)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--engine", choices=(*ENGINES, "both"), default="both", help="[%(default)s]")
    parser.add_argument("--seconds", type=float, help="of each part that counts [40; --quick 8]")


def run(context: Context) -> Outcome:
    """Run the bench. Raises InternalError if a stack serves nothing."""
    quick = Times(12.0, 8.0) if context.quick else Times()
    times = replace(quick, window_s=context.arguments.seconds or quick.window_s)
    chosen = context.arguments.engine
    engines = list(ENGINES) if chosen == "both" and not context.quick else [chosen]
    engines = ["simulated"] if engines == ["both"] else engines
    return joined([_measure(context, engine, times) for engine in engines])


def _measure(context: Context, engine: str, times: Times) -> Outcome:
    workers = WORKERS if engine == "simulated" else 1
    keys = {name: f"sk-bench-{name}" for name in ("steady", "other")}
    hashes = {name: {"sha256": hashlib.sha256(key.encode()).hexdigest()} for name, key in keys.items()}
    settings = {**ENGINES[engine], "gateway.keys": hashes}
    with start_stack(context.run_dir / f"stack-{engine}", settings, workers=workers, refuses=True) as stack:
        load = _Load(context, stack.target, keys, workers)
        context.say(f"{engine}: the peak")
        peak = uvloop.run(load.peak(times))
        if not peak.ended:
            raise InternalError(f"nothing was served: {[each.error for each in peak.answers][:1]}")
        context.say(f"{engine}: {peak.requests_per_s:.1f} requests/s; now {OVERLOAD:g} times as many")
        before_s, began_s = stack.cpu_s(), time.monotonic()
        over = uvloop.run(load.over(OVERLOAD * peak.requests_per_s, times))
        used = cpu_shares(before_s, stack.cpu_s(), time.monotonic() - began_s)
        context.say(f"{engine}: two keys, one of them floods")
        busy, flooded = uvloop.run(load.two_keys(peak.requests_per_s, times))
    for part, answers in (("peak", peak.answers), ("over", over.answers)):
        _record(context, engine, part, answers)
    _record(context, engine, "busy", busy.answers)
    _record(context, engine, "flooded", flooded.answers)
    suffix = "" if engine == "simulated" else f"_{engine}"
    made = {f"{name}{suffix}": value for name, value in figures(peak, over, busy, flooded).items()}
    failures = sum(len(part.failed) for part in (peak, over, busy, flooded))
    return Outcome(
        made,
        failures,
        tables=[_table(engine, peak, over), Table("CPU while overloaded, cores", ("process", "used"), used)],
        notes=[
            f"{engine}: {workers} workers, default settings; prompts of 64 to 512 tokens, answers of 32 to"
            " 256; what was taken is waited for, and none of it may fail",
            f"flood_p99_ratio: a key that asks for {_STEADY:g} of the peak, beside one that floods, over the "
            f"same beside one that asks for {_BUSY:g} of the peak",
        ],
    )


def cpu_shares(
    before_s: Mapping[str, float], after_s: Mapping[str, float], passed_s: float
) -> list[tuple[str, float]]:
    """Return CPU use in cores by process, highest first."""
    used = {name: (after_s[name] - before_s.get(name, 0.0)) / passed_s for name in after_s}
    return sorted(used.items(), key=lambda row: -row[1])


def figures(peak: Part, over: Part, busy: Part, flooded: Part) -> dict[str, float]:
    """Return the figures of one engine, without those that have no refused or no served requests."""
    made = {
        "peak_tok_s": peak.tokens_per_s,
        "peak_requests_s": peak.requests_per_s,
        "goodput_tok_s": over.tokens_per_s,
        "goodput_ratio": over.tokens_per_s / peak.tokens_per_s,
        "refused_share": sum(map(is_refused, over.sent)) / max(1, len(over.sent)),
    }
    refused_s = [each.ended_s - each.sent_s for each in over.refused]
    first_s = [each.first_s for each in over.ended if each.event_s]
    for name, values, scale in (("refusal_ms", refused_s, 1000.0), ("first_token_s", first_s, 1.0)):
        if values:
            made |= {f"{name}_p{at}": scale * percentile(values, at) for at in (50, 99)}
    latencies = [[each.ended_s - each.sent_s for each in part.sent if each.ok] for part in (busy, flooded)]
    if all(latencies):
        busy_s, flooded_s = (percentile(each, 99) for each in latencies)
        made |= {"busy_p99_s": busy_s, "flooded_p99_s": flooded_s, "flood_p99_ratio": flooded_s / busy_s}
        for name, part in (("busy", busy), ("flooded", flooded)):
            waits_s = [each.first_s for each in part.sent if each.ok and each.event_s]
            made |= {f"{name}_first_token_s_p{at}": percentile(waits_s, at) for at in (50, 99)}
    made["steady_refused"] = float(len(busy.refused) + len(flooded.refused))
    return made


class _Load:
    """Sends the load of one stack."""

    def __init__(self, context: Context, target: Target, keys: Mapping[str, str], workers: int) -> None:
        self._context = context
        self._target = target
        self._keys = keys
        self._workers = workers
        self._ids = vocabulary(TINY_CHAT)

    def _bodies(self, purpose: str) -> Iterator[dict[str, Any]]:
        """Return requests drawn in advance, so that sending is fast."""
        dice = self._context.random(purpose)
        drawn = [
            {
                "prompt": drawn_tokens(dice, self._ids, dice.randint(64, 512)),
                "max_tokens": dice.randint(32, 256),
                "temperature": 0,
                "ignore_eos": True,
            }
            for _ in range(_DRAWN)
        ]
        return itertools.cycle(drawn)

    async def peak(self, times: Times) -> Part:
        """Keep the stack full; requests running at the end are cancelled."""
        bodies, answers = self._bodies("peak"), list[Answer]()

        async def client() -> None:
            for body in bodies:
                answers.append(await complete(self._target, body, _DEADLINE_S))
                if not answers[-1].ok:
                    await asyncio.sleep(1.0)

        clients = [asyncio.create_task(client()) for _ in range(_AT_ONCE * self._workers)]
        from_s = time.perf_counter() + times.ramp_s
        await asyncio.sleep(times.ramp_s + times.window_s)
        for each in clients:
            each.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        return Part(answers, from_s, from_s + times.window_s)

    async def over(self, rate: float, times: Times) -> Part:
        """Send `rate` requests per second until the window ends, then wait for those accepted."""
        return await self._sent(self._target, "over", rate, times)

    async def two_keys(self, peak: float, times: Times) -> tuple[Part, Part]:
        """Return one key's answers beside a busy other key, and beside a flooding one."""
        steady, other = (replace(self._target, key=self._keys[name]) for name in ("steady", "other"))
        parts = []
        for purpose, share in (("busy", _BUSY), ("flood", OVERLOAD)):
            part, _ = await asyncio.gather(
                self._sent(steady, "steady", _STEADY * peak, times),
                self._sent(other, purpose, share * peak, times),
            )
            parts.append(part)
        return parts[0], parts[1]

    async def _sent(self, target: Target, purpose: str, rate: float, times: Times) -> Part:
        end_s = times.ramp_s + times.window_s
        gaps = poisson_times(self._context.random(f"{purpose} gaps"), rate)
        due_s = list(itertools.takewhile(lambda at_s: at_s < end_s, gaps))
        bodies = list(itertools.islice(self._bodies(purpose), len(due_s)))
        sent = await serve_all(target, bodies, len(bodies) or 1, due_s=due_s)
        return Part(sent.answers, sent.began_s + times.ramp_s, sent.began_s + end_s)


def _table(engine: str, peak: Part, over: Part) -> Table:
    rows = [
        (name, len(part.sent), part.requests_per_s, part.tokens_per_s, len(part.refused), len(part.failed))
        for name, part in (("peak", peak), (f"{OVERLOAD:g} × the peak", over))
    ]
    columns = ("load", "sent in the window", "answered/s", "tokens/s", "refused", "failed")
    return Table(f"Overload, {engine}", columns, rows)


def _record(context: Context, engine: str, part: str, answers: Sequence[Answer]) -> None:
    for each in answers:
        told = {"engine": engine, "part": part, "sent_s": each.sent_s, "ended_s": each.ended_s}
        tokens = {"prompt_tokens": each.prompt_tokens, "tokens": each.completion_tokens}
        context.record({**told, **tokens, "error": each.error})
