"""The engine's thread: messages between the steps, errors contained, a broken engine given up."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from services.worker.core.sampling import Sampled
from services.worker.core.steps import StepEffects
from services.worker.door import Door
from services.worker.engine.contract import Row
from services.worker.engine_thread import Occupancy, Runner
from shared.clock import monotonic_s
from shared.errors import CreditorLost
from shared.messages.plans import BatchPlan
from shared.messages.sequence import FinishReason
from tests.patience import PATIENCE_S, wait_until
from tests.services.worker.builders import core_of
from tests.shared.messages.builders import BLOCK_TOKENS, plan, prefill, ref, spec

POISON = 66
AWAY = 67
"""A token whose row needs a worker that lends KV, and fails."""
LOST, ERROR = FinishReason.KV_LOST, FinishReason.ERROR


class CountingEngine:
    """Says 1, 2, 3 …; fails on rows with `POISON` or `AWAY`, or on all when `broken`."""

    vocabulary = 100
    max_positions = 64
    kv_blocks = 60
    block_tokens = BLOCK_TOKENS
    weights = ""
    prefill_tokens_per_s = 0.0
    carries = (0, 0)

    def __init__(self, *, broken: bool = False) -> None:
        self.broken = broken
        self.away_blocks: set[int] = set()

    def step(self, rows: Sequence[Row]) -> list[Sampled | None]:
        if self.broken or any(POISON in row.tokens for row in rows):
            raise RuntimeError("as told")
        away = [row for row in rows if AWAY in row.tokens]
        if away:
            self.away_blocks = set(away[0].blocks)
            raise CreditorLost("as told", creditor_id="worker-9")
        return [None if row.point is None else Sampled(row.point.index + 1) for row in rows]


class Harness:
    """A runner and what it delivered."""

    def __init__(self, cores: tuple[int, ...] = ()) -> None:
        self.engine = CountingEngine()
        self.effects: list[StepEffects] = []
        self.broken: list[BaseException] = []
        self.door = Door(core_of(16), monotonic_s, self.effects.append)
        how: dict[str, Any] = {"cores": cores, "lost_blocks": self.lost_blocks}
        self.runner = Runner(self.door, self.engine, on_broken=self.broken.append, **how)

    def lost_blocks(self, error: CreditorLost) -> set[int]:
        assert error.creditor_id == "worker-9"
        return self.engine.away_blocks

    def send(self, batch: BatchPlan) -> None:
        self.door.post(lambda core, now_s: core.on_plan(batch, now_s))

    def tokens(self, request_id: str) -> list[int]:
        deltas = [d for e in list(self.effects) for f in e.frames for d in f.frame.deltas]
        return [token for delta in deltas if delta.request_id == request_id for token in delta.tokens]

    def ends(self) -> dict[str, FinishReason]:
        ended = [end for e in list(self.effects) for s in e.stepped for end in s.ended]
        return {end.ref.request_id: end.finish_reason for end in ended}

    def compute_together(self, **prompts: list[int]) -> None:
        """The only token of each, in one step."""
        starts = tuple(spec(ref(name), prompt, max_tokens=1) for name, prompt in prompts.items())
        chunks = tuple(prefill(ref(name), 0, len(prompt)) for name, prompt in prompts.items())
        self.send(plan(1, starts=starts, prefills=chunks))
        wait_until(lambda: len(self.ends()) == len(prompts))


@pytest.fixture
def harness() -> Iterator[Harness]:
    harness = Harness()
    harness.runner.start()
    yield harness
    assert harness.runner.stop(PATIENCE_S)


@pytest.mark.parametrize(
    ("prompts", "ends"),
    [
        pytest.param({"good": [1, 2], "bad": [3, POISON]}, {"bad": ERROR}, id="a row fails"),
        pytest.param({"good": [1, 2], "a": [3, AWAY], "b": [AWAY, AWAY]}, {"a": LOST, "b": LOST}, id="lost"),
        pytest.param(
            {"a": [3, AWAY], "good": [1, 2], "bad": [4, POISON]}, {"a": LOST, "bad": ERROR}, id="both at once"
        ),
    ],
)
def test_rows_that_fail_or_need_a_lost_creditor_end_and_the_others_are_computed(
    harness: Harness, prompts: dict[str, list[int]], ends: dict[str, FinishReason]
) -> None:
    """Sequences whose creditor was lost while rows were tried alone ended with an error, as if they were at
    fault, instead of being computed elsewhere."""
    harness.compute_together(**prompts)
    assert harness.ends() == {"good": FinishReason.LENGTH} | ends
    assert harness.tokens("good") == [1] and harness.broken == []


def test_time_passes_for_an_idle_worker(harness: Harness) -> None:
    harness.send(plan(1, valid_for_s=0.0))
    wait_until(lambda: any(e.stepped for e in harness.effects))


def test_the_thread_and_no_other_runs_on_its_cores() -> None:
    here = os.sched_getaffinity(0)
    core = max(here)
    bound = Harness(cores=(core,))
    bound.runner.start()
    seen = bound.door.ask(lambda _core, _now_s: os.sched_getaffinity(0)).result(PATIENCE_S)
    assert bound.runner.stop(PATIENCE_S)
    assert seen == {core} and os.sched_getaffinity(0) == here and not bound.broken


def test_time_between_iterations_counts_while_there_is_more_to_do() -> None:
    occupancy = Occupancy()
    occupancy.on_iteration(1.0, 2.0, is_more_to_do=True)
    occupancy.on_iteration(2.5, 3.0, is_more_to_do=False)
    occupancy.on_iteration(9.0, 10.0, is_more_to_do=True)
    occupancy.on_iteration(10.25, 10.5, is_more_to_do=True)
    assert (occupancy.engine_s, occupancy.between_s) == (2.75, 0.75)
