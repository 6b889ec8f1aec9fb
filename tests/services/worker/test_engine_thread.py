"""The engine's thread: messages between the steps, errors contained, a broken engine given up."""

import os
import threading
from collections.abc import Iterator, Sequence

import pytest

from services.worker.core.reports import Identity
from services.worker.core.sampling import Sampled
from services.worker.core.sequences import SequenceTable
from services.worker.core.steps import StepCore, StepEffects
from services.worker.door import Door
from services.worker.engine.contract import Row
from services.worker.engine_thread import Occupancy, Runner
from services.worker.kv.core.block_pool import BlockPool
from shared.clock import monotonic_s
from shared.errors import CreditorLost, InternalError
from shared.messages.plans import BatchPlan
from shared.messages.sequence import FinishReason
from tests.patience import PATIENCE_S, wait_until
from tests.services.worker.builders import LIMITS
from tests.shared.messages.builders import BLOCK_TOKENS, cancelling, decode, plan, prefill, ref, spec

POISON = 66
AWAY = 67
"""A token whose row needs a worker that lends KV, and fails."""


class CountingEngine:
    """Says 1, 2, 3 …; fails on rows with `POISON` or `AWAY`, or on all when `broken`; `gate` holds it."""

    vocabulary = 100
    max_positions = 64
    kv_blocks = 16
    block_tokens = BLOCK_TOKENS
    weights = ""
    prefill_tokens_per_s = 0.0

    def __init__(self) -> None:
        self.broken = False
        self.away_blocks: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.inside = threading.Event()

    def step(self, rows: Sequence[Row]) -> list[Sampled | None]:
        self.inside.set()
        assert self.gate.wait(PATIENCE_S)
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
        core = StepCore(
            Identity("worker-0", 1, "model", 64, "host"), SequenceTable(BlockPool(16, BLOCK_TOKENS), LIMITS)
        )
        self.door = Door(core, monotonic_s, self.effects.append)
        self.runner = Runner(
            self.door,
            self.engine,
            on_broken=self.broken.append,
            cores=cores,
            lost_blocks=self.lost_blocks,
        )

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
        """The first token of each, in one step."""
        plans = [start_plan(1, name, prompt) for name, prompt in prompts.items()]
        starts = tuple(start for each in plans for start in each.starts)
        chunks = tuple(chunk for each in plans for chunk in each.prefills)
        self.send(plan(1, starts=starts, prefills=chunks))
        wait_until(lambda: len(self.ends()) == len(prompts))


@pytest.fixture
def harness() -> Iterator[Harness]:
    harness = Harness()
    harness.runner.start()
    yield harness
    harness.engine.gate.set()
    assert harness.runner.stop(PATIENCE_S)


def start_plan(seq: int, name: str, prompt: list[int], steps: int = 1) -> BatchPlan:
    return plan(
        seq,
        steps=steps,
        starts=(spec(ref(name), prompt, max_tokens=steps),),
        prefills=(prefill(ref(name), 0, len(prompt)),),
        decodes=(decode(ref(name), 8),),
    )


def test_a_cancel_is_looked_at_between_the_steps_of_a_plan(harness: Harness) -> None:
    harness.engine.gate.clear()
    harness.send(start_plan(1, "a", [1, 2], steps=20))
    assert harness.engine.inside.wait(PATIENCE_S)
    harness.door.post(lambda core, now_s: core.on_cancel(cancelling(ref("a")), now_s))
    harness.engine.gate.set()
    wait_until(lambda: "a" in harness.ends())
    assert harness.ends() == {"a": FinishReason.CANCELLED} and harness.tokens("a") == [1]


def test_a_row_that_fails_ends_its_sequence_only(harness: Harness) -> None:
    harness.compute_together(good=[1, 2], bad=[3, POISON])
    assert harness.ends() == {"good": FinishReason.LENGTH, "bad": FinishReason.ERROR}
    assert harness.tokens("good") == [1] and harness.broken == []


def test_rows_that_need_a_lost_creditor_end_and_the_others_are_computed(harness: Harness) -> None:
    harness.compute_together(good=[1, 2], bad=[3, AWAY], worse=[AWAY, AWAY])
    lost = FinishReason.KV_LOST
    assert harness.ends() == {"good": FinishReason.LENGTH, "bad": lost, "worse": lost}
    assert harness.tokens("good") == [1] and harness.broken == []


def test_a_creditor_lost_while_rows_are_tried_alone_is_no_error_of_theirs(harness: Harness) -> None:
    """Their sequences ended with an error, as if they were at fault, instead of being computed elsewhere."""
    harness.compute_together(away=[3, AWAY], good=[1, 2], bad=[4, POISON])
    assert harness.ends() == {
        "away": FinishReason.KV_LOST,
        "good": FinishReason.LENGTH,
        "bad": FinishReason.ERROR,
    }
    assert harness.broken == []


def test_an_engine_that_computes_nothing_any_more_is_given_up(harness: Harness) -> None:
    harness.engine.broken = True
    for seq, name in enumerate("abc", start=1):
        harness.send(start_plan(seq, name, [1, 2]))
    wait_until(lambda: bool(harness.broken))
    assert isinstance(harness.broken[0], InternalError)
    assert harness.ends() == {"a": FinishReason.ERROR, "b": FinishReason.ERROR}


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
