"""What the simulator's tests have in common: a plain cost, small machines, a policy that follows a script."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.scheduler.policy.contract import (
    Holding,
    PlannedBatch,
    PlannedDecode,
    PlannedPrefill,
    PolicySettings,
    Task,
    WorkerShape,
)
from shared.messages.commands import LengthPrediction
from shared.messages.sequence import SequenceKey
from sim.books import WorkerBooks
from sim.predictors import find_predictor
from sim.requests import SimRequest
from sim.setup import Outcome, Setup
from sim.simulation import Simulation

SHAPE = WorkerShape(block_tokens=4, capacity_blocks=16)
SETTINGS = PolicySettings(max_batch_sequences=8, token_budget=32, max_steps=4)


@dataclass(frozen=True)
class OneSecond:
    """Every step takes a second, however much is in it."""

    name: str = "one second"
    source: str = "made up"

    def step_s(self, chunks: Sequence[tuple[int, int]], decodes: int, context_tokens: int) -> float:
        return 1.0 if chunks or decodes else 0.0


@dataclass
class Scripted:
    """A policy that returns the given batches in turn, and remembers what it was told."""

    script: list[PlannedBatch]
    heard: list[tuple[str, object]] = field(default_factory=list)

    def on_arrival(self, task: Task, now_s: float) -> None:
        self.heard.append(("arrival", task.key))

    def on_adopted(self, task: Task, holding: Holding, now_s: float) -> None:
        raise AssertionError("nothing is adopted in the simulator")

    def on_ended(self, key: SequenceKey, now_s: float, answer_tokens: int | None = None) -> None:
        self.heard.append(("ended", (key, now_s)))

    def on_short(self, key: SequenceKey, missing_tokens: int, now_s: float) -> None:
        self.heard.append(("short", (key, missing_tokens, now_s)))

    def on_prefix_hit(self, key: SequenceKey, cached_tokens: int, now_s: float) -> None:
        raise AssertionError("nothing is stored in the simulator")

    def on_resized(self, capacity_blocks: int, now_s: float) -> None:
        raise AssertionError("no worker is resized here")

    def on_measured(self, prefill_tokens_per_s: float, decode_step_s: float, now_s: float) -> None:
        self.heard.append(("measured", (prefill_tokens_per_s, decode_step_s)))

    def on_predicted(self, key: SequenceKey, prediction: LengthPrediction, now_s: float) -> None:
        self.heard.append(("predicted", (key, prediction.rl_tokens, now_s)))

    def plan(self, now_s: float) -> PlannedBatch | None:
        return self.script.pop(0) if self.script else None

    def check_integrity(self) -> None:
        """It has no books."""


def request(
    index: int = 0, prompt: int = 4, output: int = 3, arrival_s: float = 0.0, limit: int = 16
) -> SimRequest:
    return SimRequest(index, arrival_s, prompt, output, limit)


def books() -> WorkerBooks:
    return WorkerBooks(SHAPE, SETTINGS, {}, set())


def prefill(one: SimRequest, first: int, end: int, blocks: int) -> PlannedBatch:
    return PlannedBatch(prefills=(PlannedPrefill(one.key, first, end, blocks),))


def decode(one: SimRequest, steps: int, blocks: int) -> PlannedBatch:
    return PlannedBatch(steps=steps, decodes=(PlannedDecode(one.key, steps, blocks),))


def simulated(
    policy: str,
    requests: Sequence[SimRequest],
    shape: WorkerShape = SHAPE,
    settings: PolicySettings = SETTINGS,
    **kinds: Any,
) -> Outcome:
    """A whole run; what is not named: steps of a second, an oracle."""
    cost, predictor = kinds.pop("cost", OneSecond()), kinds.pop("predictor", "oracle")
    told = find_predictor(predictor) if isinstance(predictor, str) else predictor
    return Simulation(Setup(policy, shape, settings, cost, told, **kinds), list(requests)).run()
