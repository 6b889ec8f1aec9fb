"""Replay a recorded live run (`services record`) in the simulator.

An unchanged replay sends requests to their recorded workers and ends steps when the recorded ones ended. It
shows whether the policy makes the same decisions: which requests start when, and in which batches.

With another policy or more workers, placement is simulated and step times come from a fit to the recorded
steps. A request's latency is then compared with its latency in an unchanged replay under the same fit.

Cache hits and predictions are as recorded. Migrations, loans and kills are not replayed: a sequence stays at
its first worker.

    python -m sim.replay FILE                                  share of decisions that agree
    python -m sim.replay FILE --request ID --policy ecoserve   one request's latency under another policy
"""

import json
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from services.scheduler.policy.contract import PolicySettings, QueueOrder, WorkerShape
from services.scheduler.policy.fleet_queue import FEED_SEQUENCES
from shared.command_line import Parser
from shared.errors import ConfigError
from shared.messages.commands import LengthPrediction
from shared.messages.sequence import SequenceKey
from sim.linear_cost import LEAST_STEPS, LinearCost, MeasuredStep, fit_linear
from sim.predictors import NoPredictor
from sim.requests import ServedRecord, SimRequest
from sim.routers import find_router
from sim.setup import Outcome, Setup
from sim.simulation import Simulation

FORMAT = "kvasir-recording-1"
_LONGEST_GAP_S = 0.02
"""Longest gap between two steps of a busy worker, bus latency included. A longer gap is idle time."""
_SLACK_S = 0.0005
"""Largest clock difference between two services on one machine."""


@dataclass(slots=True)
class RecordedRequest:
    """One recorded sequence, on the recording's clock."""

    name: SequenceKey
    arrival_s: float
    prompt_tokens: int
    max_tokens: int
    answer_tokens: int = 0
    cached_tokens: int = 0
    predictions: list[LengthPrediction] = field(default_factory=list)
    predicted_s: float | None = None
    worker: str = ""
    """First worker."""
    started_s: float | None = None
    ended_s: float | None = None


@dataclass(slots=True)
class RecordedRun:
    """The parts of a recording that the simulator needs."""

    rules: dict[str, Any]
    """The scheduler's rules, from its status."""
    placement: str
    workers: dict[str, WorkerShape]
    requests: list[RecordedRequest]
    """In order of arrival, without requests that arrived before the recording began."""
    ends_s: dict[str, list[float]]
    """Step end times by worker."""
    steps: list[MeasuredStep]
    batches: dict[str, list[frozenset[SequenceKey]]]
    """Sequences in each step, by worker."""

    @property
    def settings(self) -> PolicySettings:
        names = ("chunked_prefill", "max_batch_sequences", "token_budget", "max_steps", "start_tokens")
        return PolicySettings(
            **{name: self.rules[name] for name in names}, options=dict(self.rules["policy_options"])
        )

    @property
    def cost(self) -> LinearCost:
        """Cost model fitted to the recorded steps. Raises ConfigError if there are too few."""
        try:
            return fit_linear(self.steps, name="recorded")
        except ValueError as error:
            raise ConfigError(f"this recording cannot be replayed: {error}") from None


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of a replay with the live run, as shares."""

    requests: int
    same_worker: float
    same_order: float
    """Share of pairs, started at one worker, that start in the same order."""
    same_batches: float
    """Share of the pairs in one step live or in the replay that were so in both."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One request under other settings. `later_s` is positive if it ends later."""

    policy: str
    workers: int
    took_s: float
    later_s: float


def read_recording(path: Path) -> RecordedRun:
    """Return the recording in `path`. Raises ConfigError if it is not a recording or its version is too
    old."""
    lines = path.read_text().splitlines()
    try:
        head, *events = (json.loads(line) for line in lines)
        known = head["format"] == FORMAT and "setup" in head
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise ConfigError(
            f"{path} is no recording that can be replayed; `services record --out FILE` makes one"
        )
    models = sorted({each["model"] for each in head["setup"]["workers"] if "model" in each})
    if len(models) > 1:
        raise ConfigError(f"{path} is of {len(models)} models ({', '.join(models)}): record a stack of one")
    return recorded_run(head["setup"], events)


def recorded_run(setup: Mapping[str, Any], events: Iterable[Mapping[str, Any]]) -> RecordedRun:
    """Return the run described by a recording's head and events; times are on the wall clock."""
    shapes = {
        each["worker"]: WorkerShape(each["block_tokens"], each["total_blocks"]) for each in setup["workers"]
    }
    run = RecordedRun(dict(setup["rules"]), setup["placement"], shapes, [], {}, [], {})
    known: dict[SequenceKey, RecordedRequest] = {}
    steps: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for event in sorted(events, key=lambda event: float(event["unix_s"])):
        if event["kind"] == "step":
            steps[event["instance"]].append(event)
        elif "request" in event:
            _take(known, event)
    computed = {name: _take_steps(run, name, each) for name, each in steps.items()}
    for request in known.values():
        if not request.answer_tokens:
            request.answer_tokens = sum(counts.get(request.name, 0) for counts in computed.values())
        if request.answer_tokens:
            request.max_tokens = max(request.max_tokens, request.answer_tokens)
            run.requests.append(request)
    run.requests.sort(key=lambda request: request.arrival_s)
    return run


def _take(known: dict[SequenceKey, RecordedRequest], event: Mapping[str, Any]) -> None:
    key, at_s, kind = (event["request"], event.get("choice", 0)), float(event["unix_s"]), event["kind"]
    request = known.get(key)
    if kind == "submitted" and request is None and not event["known"] and not event["resumed_tokens"]:
        known[key] = RecordedRequest(key, at_s, event["prompt_tokens"], event["max_tokens"])
    elif request is None:
        return
    elif kind == "predicted":
        request.predicted_s = at_s if request.predicted_s is None else request.predicted_s
        request.predictions.append(_prediction(event))
    elif kind == "found":
        request.cached_tokens = request.cached_tokens or event["tokens"]
    elif kind == "started" and request.started_s is None:
        request.started_s, request.worker = at_s, event["worker"]
    elif kind == "left" and event["generated_tokens"]:
        request.answer_tokens, request.ended_s = event["generated_tokens"], at_s


def _prediction(event: Mapping[str, Any]) -> LengthPrediction:
    return LengthPrediction(
        rl_tokens=event["tokens"],
        p50_tokens=event["p50_tokens"],
        p80_tokens=event["p80_tokens"],
        p90_tokens=event["p90_tokens"],
        p95_tokens=event["p95_tokens"],
        model_version=event["model"],
    )


def _take_steps(run: RecordedRun, worker: str, events: Sequence[Mapping[str, Any]]) -> dict[SequenceKey, int]:
    """Add one worker's steps, in order; return the number of answer tokens computed per sequence."""
    contexts: dict[SequenceKey, int] = {}
    generated: dict[SequenceKey, int] = defaultdict(int)
    ends_s, batches = run.ends_s.setdefault(worker, []), run.batches.setdefault(worker, [])
    for event in events:
        begin_s, step_s = float(event["unix_s"]), float(event["step_s"])
        own = [(name, choice) for name, choice, _ in event["own"]]
        chunks = {(name, choice): (first, end) for name, choice, _, first, end in event["chunks"]}
        context_tokens = sum(contexts.get(key, 0) + 1 for key in own)
        gap_s = begin_s - ends_s[-1] if ends_s else 1.0
        took_s = step_s + (gap_s if 0 <= gap_s < _LONGEST_GAP_S else 0.0)
        run.steps.append(MeasuredStep(event["prefill_tokens"], len(own), took_s, context_tokens))
        ends_s.append(begin_s + step_s)
        batches.append(frozenset((*own, *chunks)))
        for key in own:
            contexts[key] = contexts.get(key, 0) + 1
            generated[key] += 1
        for key, (_, end) in chunks.items():
            contexts[key] = end
            generated[key] = max(generated[key], 1)
    return generated


class RecordedPredictor(NoPredictor):
    """Replays recorded predictions in order; returns None if none was recorded."""

    def __init__(self, told: Mapping[int, Sequence[LengthPrediction]]) -> None:
        super().__init__("recorded")
        self._told = {index: list(each) for index, each in told.items()}

    def predict(self, request: SimRequest, generated_tokens: int) -> LengthPrediction | None:
        told = self._told.get(request.index)
        if not told:
            return None
        return told.pop(0) if len(told) > 1 else told[0]


class Replay:
    """A recording that can be replayed unchanged or under other settings."""

    def __init__(self, run: RecordedRun) -> None:
        """Raises ConfigError if the recording has too few requests or steps."""
        if not run.requests or len(run.steps) < LEAST_STEPS:
            found = f"{len(run.requests)} whole requests and {len(run.steps)} steps"
            raise ConfigError(f"this recording has {found}, too few to replay: record while it serves")
        self.run = run
        self._begin_s = run.requests[0].arrival_s
        self._names = sorted(run.workers)
        self._requests = [
            SimRequest(
                index, each.arrival_s - self._begin_s, each.prompt_tokens, each.answer_tokens, each.max_tokens
            )
            for index, each in enumerate(run.requests)
        ]
        self._cost = run.cost

    def as_it_was(self) -> Outcome:
        """Replay with the recorded policy, workers and step end times."""
        bus_s = self._report_s()
        ends_s = [
            [end_s + bus_s - self._begin_s for end_s in self.run.ends_s.get(name, ())] for name in self._names
        ]
        return self._run(self.run.rules["policy"], len(self._names), ends_s)

    def otherwise(self, policy: str | None = None, workers: int | None = None) -> Outcome:
        """Replay with fitted step times. Raises ConfigError for an unknown policy."""
        return self._run(policy or self.run.rules["policy"], workers or len(self._names), ())

    def what_if(self, name: str, policy: str | None = None, more_workers: int = 0) -> WhatIf:
        """Compare one request with an unchanged replay. Raises ConfigError for an unknown request."""
        index = next((at for at, each in enumerate(self.run.requests) if each.name[0] == name), None)
        if index is None:
            raise ConfigError(f"the recording has no whole request {name}")
        count = len(self._names) + more_workers
        before, after = self.otherwise().records[index], self.otherwise(policy, count).records[index]
        return WhatIf(policy or self.run.rules["policy"], count, after.jct_s, after.jct_s - before.jct_s)

    def agreement(self, outcome: Outcome) -> Agreement:
        """Return how far a replay's decisions agree with the recorded ones."""
        pairs = list(zip(self.run.requests, outcome.records, strict=True))
        begun = [(each, record) for each, record in pairs if each.started_s is not None]
        same = [(each, record) for each, record in begun if each.worker == self._names[record.worker]]
        ordered = [_agree(a, b) for a, b in combinations(same, 2) if a[0].worker == b[0].worker]
        return Agreement(
            len(begun),
            _share(len(same), len(begun)),
            _share(sum(ordered), len(ordered)),
            self._batches(outcome),
        )

    def _batches(self, outcome: Outcome) -> float:
        keys = {each.name: index for index, each in enumerate(self.run.requests)}
        live = {
            pair
            for batches in self.run.batches.values()
            for batch in batches
            for pair in combinations(sorted(keys[name] for name in batch if name in keys), 2)
        }
        replayed = _together(outcome.records)
        return _share(len(live & replayed), len(live | replayed))

    def _report_s(self) -> float:
        """Return the median delay from a step's end to the scheduler's record of a sequence's end."""
        delays_s = []
        for request in self.run.requests:
            ends_s = self.run.ends_s.get(request.worker, ())
            if request.ended_s is not None and (at := bisect_right(ends_s, request.ended_s + _SLACK_S)):
                delays_s.append(max(0.0, request.ended_s - ends_s[at - 1]))
        return median(delays_s) if delays_s else 0.0

    def _placed(self) -> dict[SequenceKey, int]:
        return {
            request.key: self._names.index(each.worker)
            for request, each in zip(self._requests, self.run.requests, strict=True)
            if each.worker in self._names
        }

    def _run(self, policy: str, workers: int, ends_s: Sequence[Sequence[float]]) -> Outcome:
        rules, run = self.run.rules, self.run
        asked_s = [each.predicted_s - each.arrival_s for each in run.requests if each.predicted_s is not None]
        is_same = policy == rules["policy"]
        settings = run.settings if is_same else replace(run.settings, options={})
        setup = Setup(
            policy,
            next(iter(run.workers.values())),
            settings,
            self._cost,
            RecordedPredictor({at: each.predictions for at, each in enumerate(run.requests)}),
            workers=workers,
            router=find_router(run.placement),
            queue=QueueOrder(rules["queue"]) if is_same and rules["queue"] else None,
            places=rules.get("feed_sequences", FEED_SEQUENCES),
            outstanding_steps=rules["outstanding_steps"],
            ahead_s=rules["ahead_s"],
            prediction_delay_s=max(1e-6, median(asked_s)) if asked_s else 0.0,
            step_ends_s=ends_s,
            found_tokens={
                request.key: each.cached_tokens
                for request, each in zip(self._requests, run.requests, strict=True)
                if each.cached_tokens
            },
            placed=self._placed() if ends_s else {},
        )
        return Simulation(setup, self._requests).run()


def _agree(a: tuple[RecordedRequest, ServedRecord], b: tuple[RecordedRequest, ServedRecord]) -> bool:
    """Whether two sequences started in the same order live and in the replay; ties agree."""
    live_s = (a[0].started_s or 0.0) - (b[0].started_s or 0.0)
    replayed_s = _start_s(a[1]) - _start_s(b[1])
    return live_s * replayed_s >= 0


def _start_s(record: ServedRecord) -> float:
    return record.request.arrival_s + record.queue_s


def _together(records: Sequence[ServedRecord]) -> set[tuple[int, int]]:
    """Return the pairs of requests that ran at one worker at the same time."""
    found = set()
    for a, b in combinations(records, 2):
        if a.worker == b.worker and _start_s(a) < b.end_s and _start_s(b) < a.end_s:
            found.add((a.request.index, b.request.index))
    return found


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and print JSON. Returns 0, or 2 if the recording cannot be replayed."""
    parser = Parser(prog="python -m sim.replay")
    parser.add_argument("recording", type=Path)
    parser.add_argument("--request", help="what else would have become of this one")
    parser.add_argument("--policy", action="append", default=[], help="instead of its own; repeatable")
    parser.add_argument("--more-workers", type=int, action="append", default=[], help="repeatable")
    flags = parser.parse_args(argv)
    try:
        replay = Replay(read_recording(flags.recording))
        told: dict[str, Any] = {"agreement": asdict(replay.agreement(replay.as_it_was()))}
        if flags.request:
            others = [replay.what_if(flags.request, policy=name) for name in flags.policy]
            others += [replay.what_if(flags.request, more_workers=count) for count in flags.more_workers]
            told["what_if"] = [asdict(each) for each in others]
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(told, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
