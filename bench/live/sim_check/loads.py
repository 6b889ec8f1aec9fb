"""Measurements of a live load for `sim-check`, kept as lines of JSON to compute costs and errors again
without a stack.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from bench.kit.context import Context
from bench.kit.load import Answer
from bench.kit.stacks import Stack
from bench.live.chats import LiveRun, chat_bodies, run_load
from shared.errors import ConfigError, InternalError

FILE = "loads.jsonl"


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of the stack, live and simulated."""

    workers: int
    kv_blocks: int
    sequences: int
    policy: str
    max_tokens: int
    cores: int


@dataclass(frozen=True, slots=True)
class Seen:
    """One answer as its client saw it. `sent_s` counts from the load's start, other times from `sent_s`."""

    sent_s: float
    first_s: float
    whole_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """One report of a worker, with its time since the load's start."""

    at_s: float
    worker_id: str
    seq: int
    plan_seq: int
    steps_done: int
    prefilled_tokens: int
    decoded_tokens: int
    context_tokens: int
    step_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """One live run, with its CPU time."""

    kind: str
    """`whole`: all at once; `lesson`: for the costs; `predicted`."""
    percent: int
    """Percent of the throughput of `whole`."""
    failures: int
    span_s: float
    engine_s: float
    """CPU time of all engines."""
    rest_s: float
    """CPU time of everything else, this client included."""
    answers: Sequence[Seen]
    steps: Sequence[Step]

    @property
    def tokens(self) -> int:
        return sum(one.output_tokens for one in self.answers)


def measure(
    stack: Stack, kind: str, percent: int, count: int, rate: float, seed: int, max_tokens: int
) -> Load:
    """Measure a load. Raises InternalError if nothing was answered."""
    before, own_s = stack.cpu_s(), time.process_time()
    run = run_load(stack, chat_bodies(count, seed, max_tokens), rate, seed, max_tokens)
    if run.failures == len(run.answers):
        raise InternalError(f"no request was answered: {run.answers[0].error}")
    used = {name: spent_s - before.get(name, 0.0) for name, spent_s in stack.cpu_s().items()}
    engine_s = sum(spent_s for name, spent_s in used.items() if name.endswith("engine"))
    span_s = max(one.ended_s for one in run.answers) - run.start_s
    rest_s = sum(used.values()) - engine_s + time.process_time() - own_s
    whole = [one for one in run.answers if one.ok and one.completion_tokens and one.event_s]
    answers = [_seen(one, run.start_s) for one in whole]
    return Load(kind, percent, run.failures, span_s, engine_s, rest_s, answers, _steps(run))


def _seen(answer: Answer, start_s: float) -> Seen:
    sent_s, tokens = answer.sent_s, (answer.prompt_tokens, answer.completion_tokens)
    return Seen(sent_s - start_s, answer.first_s, answer.ended_s - sent_s, *tokens)


def _steps(run: LiveRun) -> list[Step]:
    return [
        Step(at_s - run.start_s, *(getattr(event, one.name) for one in fields(Step)[1:]))
        for at_s, event in run.steps
    ]


def keep(context: Context, setting: Setting, loads: Sequence[Load]) -> None:
    """Write the loads to the run's folder."""
    context.record(asdict(setting), FILE)
    for load in loads:
        context.record(asdict(load), FILE)


def kept(file: Path) -> tuple[Setting, list[Load]]:
    """Read the loads that `keep` wrote. Raises ConfigError for any other file."""
    try:
        first, *others = [json.loads(line) for line in file.read_text().splitlines()]
        return Setting(**first), [_load(each) for each in others]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{file} has no loads of sim-check: {error!r}", param="loads") from error


def _load(told: dict[str, Any]) -> Load:
    answers = [Seen(**each) for each in told.pop("answers")]
    steps = [Step(**each) for each in told.pop("steps")]
    return Load(**told, answers=answers, steps=steps)
