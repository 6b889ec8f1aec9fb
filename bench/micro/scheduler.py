"""`python -m bench scheduler`: cost of a plan with a long queue, and of an event with many workers.

One call is a request's arrival with its prediction, another's end, and the next plan, with 64 sequences
running and q waiting. Lengths are drawn from the ShareGPT quantiles of `sim/workloads.py`. The calls are
replayed several times on new policy objects. Each call counts with its fastest replay, which removes bursts
of other processes; the garbage collector runs as in a service. `growth` is the slope of log p50 over log q. A
second part (`lanes.py`) measures whole events of the scheduler's core.

Source: papers/003 §4 (Scheduling Time Overhead); goals are in docs/benchmarks/scheduler.md.
"""

import math
import time
from argparse import ArgumentParser
from random import Random

from bench.kit.context import Context
from bench.kit.outcome import Outcome, Table
from bench.kit.stats import exponent
from bench.micro.lanes import measure_events
from services.scheduler.policy import find_policy, policy_names
from services.scheduler.policy.contract import BatchPolicy, PlannedBatch, PolicySettings, Task, WorkerShape
from shared.errors import ConfigError
from shared.messages.commands import LengthPrediction
from shared.messages.sequence import SequenceKey
from sim.workloads import WORKLOADS

RUNNING = 64
STEP_S = 0.025
SHAPE = WorkerShape(block_tokens=16, capacity_blocks=4096)
SETTINGS = PolicySettings(max_batch_sequences=RUNNING, token_budget=2048, start_tokens=1 << 30)
_WARM_UP_CALLS = 200


def add_arguments(parser: ArgumentParser) -> None:
    """Add the bench's flags."""
    parser.add_argument("--policies", default="kvasir", help="names with commas, or all [%(default)s]")
    parser.add_argument(
        "--queued", type=int, nargs="+", default=[100, 1000, 10_000], help="sequences that wait"
    )
    parser.add_argument("--lanes", type=int, help="busy workers of the second part [1000, quick: 50]")
    parser.add_argument("--calls", type=int, default=2000, help="measured for each length [%(default)s]")
    parser.add_argument("--replays", type=int, default=3, help="of the same calls [%(default)s]")


class Replay:
    """A policy object with `queued` waiting, and the calls to it. The same seed makes the same calls."""

    def __init__(self, policy: BatchPolicy, queued: int, seed: int) -> None:
        self._policy = policy
        self._random = Random(f"{seed}/{queued}")
        self._now_s = 0.0
        self._arrived = 0
        self._decoding: dict[SequenceKey, None] = {}
        for _ in range(queued + RUNNING):
            self.arrive(self._task())

    def _task(self) -> Task:
        law = WORKLOADS["sharegpt"]
        answer, limit = law.output.draw(self._random), law.max_tokens
        guess = min(limit, max(1, round(answer * math.exp(self._random.gauss(0.0, 0.5)))))
        self._arrived += 1
        return Task(
            (f"r{self._arrived:08}", 0),
            law.prompt.draw(self._random),
            limit,
            self._now_s,
            prediction=LengthPrediction(
                rl_tokens=guess,
                p50_tokens=guess,
                p80_tokens=round(1.5 * guess),
                p90_tokens=round(1.9 * guess),
                p95_tokens=round(2.3 * guess),
                model_version="bench",
            ),
        )

    def arrive(self, task: Task) -> None:
        self._policy.on_arrival(task, self._now_s)

    @property
    def running(self) -> int:
        return len(self._decoding)

    def call(self) -> float:
        """Return the seconds of one arrival, one end and one plan, without choosing the sequence that
        ends."""
        self._now_s += STEP_S
        task = self._task()
        names = list(self._decoding)
        ended = names[self._random.randrange(len(names))] if names else None
        begin = time.perf_counter()
        self._policy.on_arrival(task, self._now_s)
        if ended is not None:
            self._policy.on_ended(ended, self._now_s)
        batch = self._policy.plan(self._now_s)
        took_s = time.perf_counter() - begin
        if ended is not None:
            del self._decoding[ended]
        self._note(batch)
        return took_s

    def _note(self, batch: PlannedBatch | None) -> None:
        if batch is None:
            return
        for preemption in batch.preemptions:
            self._decoding.pop(preemption.key, None)
        self._decoding.update((decode.key, None) for decode in batch.decodes)


def run(context: Context) -> Outcome:
    """Run the bench. Raises ConfigError for an unknown policy."""
    flags = context.arguments
    calls = min(flags.calls, 400) if context.quick else flags.calls
    names = policy_names() if flags.policies == "all" else flags.policies.split(",")
    if min([calls, flags.replays, *flags.queued]) < 1:
        raise ConfigError("calls, replays and queued are at least 1", param="calls")
    figures: dict[str, float] = {}
    rows: list[list[object]] = []
    with context.progress("lengths", len(names) * len(flags.queued)) as progress:
        for name in names:
            prefix = "" if name == names[0] else f"{name}_"
            medians = {}
            for queued in flags.queued:
                progress.advance(0, f"{name}, {queued} waiting")
                took_ms, running = _measure(name, queued, calls, flags.replays, context.seed)
                medians[queued] = _quantile(took_ms, 0.5)
                figures[f"{prefix}plan_ms_p50_q{queued}"] = medians[queued]
                figures[f"{prefix}plan_ms_p99_q{queued}"] = _quantile(took_ms, 0.99)
                rows.append([name, queued, medians[queued], _quantile(took_ms, 0.99), took_ms[-1], running])
                progress.advance()
            if len(medians) > 1:
                figures[f"{prefix}growth"] = exponent(medians)
    lanes = flags.lanes or (50 if context.quick else 1000)
    context.say(f"{lanes} workers with {RUNNING} sequences each")
    events_ms = measure_events(names[0], lanes, 5 * calls, context.seed)
    for share in (0.5, 0.99):
        figures[f"event_ms_p{share * 100:.0f}_lanes{lanes}"] = _quantile(events_ms, share)
    title = f"milliseconds of one arrival, one end and one plan ({calls} calls, fastest of {flags.replays})"
    table = Table(title, ("policy", "waiting", "p50", "p99", "max", "decoding"), rows)
    notes = [
        f"{len(events_ms)} events of {lanes} busy workers, CPU time of each, with all plans that come of it"
    ]
    return Outcome(figures, failures=0, tables=[table], notes=notes)


def _measure(name: str, queued: int, calls: int, replays: int, seed: int) -> tuple[list[float], float]:
    """Return each call's fastest replay in ms, sorted, and the mean number of decodes."""
    fastest = [math.inf] * calls
    running = 0
    for _ in range(replays):
        replay = Replay(find_policy(name)(SHAPE, SETTINGS), queued, seed)
        for _ in range(_WARM_UP_CALLS):
            replay.call()
        for index in range(calls):
            fastest[index] = min(fastest[index], 1e3 * replay.call())
            running += replay.running
    return sorted(fastest), running / (calls * replays)


def _quantile(ascending: list[float], share: float) -> float:
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]
