"""Steps in flight: answers stay what they are, blocks stay with the step that may write to them."""

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch

from services.worker.core.costs import find_cost
from services.worker.core.sampling import Sampled
from services.worker.engine.contract import StepRows, StepTicket
from services.worker.engine.engine import TorchEngine
from services.worker.engine.loading import describe
from services.worker.engine.native.library import AttentionMode
from services.worker.engine.simulated import SimulatedEngine, answer_tokens, token_at
from shared.errors import CreditorLost
from shared.messages.sequence import FinishReason, Sampling, SequenceRef
from tests.services.worker.by_hand import Thread
from tests.services.worker.conftest import ModelFactory
from tests.shared.messages.builders import acknowledging, cancelling, decode, plan, ref
from tests.stack.actors import TrueDrafts

BLOCK_TOKENS, BLOCKS = 4, 96
SIZES: dict[str, Any] = {
    "vocabulary": 64,
    "max_positions": 200,
    "kv_blocks": BLOCKS,
    "block_tokens": BLOCK_TOKENS,
    "cost": find_cost("llama2-7b-a100"),
    "speed": 1e4,
}
END = 2
SEED = next(seed for seed in range(1000) if answer_tokens(seed, 0) == 9)
"""Of an answer of eight tokens and its end."""


def simulated(overlaps: bool = True) -> SimulatedEngine:
    engine = SimulatedEngine(**SIZES)
    engine.overlaps = overlaps
    return engine


class Counting(SimulatedEngine):
    """Counts the rows of its steps."""

    def submit(self, rows: StepRows) -> StepTicket:
        self.rows = [*getattr(self, "rows", ()), len(rows)]
        return super().submit(rows)


def how(seed: int = 3, max_tokens: int = 12, ends: tuple[int, ...] = (END,), **more: object) -> Sampling:
    return Sampling(seed=seed, max_tokens=max_tokens, end_token_ids=ends, **more)  # type: ignore[arg-type]


def answer(sampling: Sampling) -> list[int]:
    found: list[int] = []
    while len(found) < sampling.max_tokens and (not found or found[-1] not in sampling.end_token_ids):
        found.append(token_at(sampling, 0, len(found), 64))
    return found


def test_the_next_step_begins_before_the_last_ones_tokens_are_there() -> None:
    thread = Thread(simulated())
    thread.start({"a": how(), "b": how(4)})
    thread.turn()
    assert thread.tokens("a") == [], "its first step is in flight"
    thread.turn()
    assert len(thread.tokens("a")) == 1 and thread.table.in_flight, "and the second one when that one is over"
    thread.turn(40)
    assert thread.tokens("a") == answer(how()) and thread.tokens("b") == answer(how(4))
    assert (
        not thread.table.in_flight
        and thread.table.pool.free_blocks + thread.table.pool.evictable_blocks == BLOCKS
    )


def test_an_end_by_length_is_known_beforehand() -> None:
    engine = Counting(**SIZES)
    thread = Thread(engine)
    thread.start({"a": how(max_tokens=4), "b": how(4, max_tokens=7)})
    thread.turn(40)
    assert engine.rows == [2, 2, 2, 2, 1, 1, 1] and len(thread.tokens("b")) == 7


def test_an_end_token_is_seen_one_step_late_and_its_blocks_stay_until_then() -> None:
    engine = Counting(**SIZES)
    thread = Thread(engine)
    thread.start({"a": how(SEED, max_tokens=30), "b": how(4, max_tokens=14, ends=())})
    thread.turn_until_the_end("a")
    assert thread.tokens("a") == answer(how(SEED, max_tokens=30)) and len(thread.tokens("a")) == 9
    held = [block for table in thread.table.in_flight.blocks for block in table]
    assert held, "a step in flight may still write to its blocks"
    free_blocks = thread.table.pool.free_blocks + thread.table.pool.evictable_blocks
    assert thread.effects[-1].stepped[-1].free_blocks == free_blocks + len(held), "plans may count on them"
    thread.turn()
    assert not thread.table.in_flight.leaving_blocks
    thread.turn(40)
    assert engine.rows == [2] * 10 + [1] * 4, "one row is computed in vain"
    assert thread.tokens("a") == answer(how(SEED, max_tokens=30)) and len(thread.tokens("b")) == 14
    assert thread.ends() == {"a": FinishReason.STOP, "b": FinishReason.LENGTH}


def test_commands_find_no_step_in_flight_and_plans_do() -> None:
    thread = Thread(simulated())
    thread.start({"a": how(), "b": how(4)})
    thread.turn(3)
    before = len(thread.tokens("a"))
    asked = thread.door.ask(lambda core, now_s: core.report(now_s))
    thread.door.post(lambda core, now_s: core.on_cancel(cancelling(ref("b")), now_s))
    thread.runner._take_commands()
    assert not thread.table.in_flight and len(thread.tokens("a")) == before + 1
    assert asked.result().sequences[0].generated_tokens == before + 1
    thread.turn(40)
    assert thread.tokens("a") == answer(how()) and thread.ends()["b"] is FinishReason.CANCELLED


def test_a_plan_that_needs_blocks_or_takes_them_waits_for_the_steps_in_flight() -> None:
    thread = Thread(simulated(), cached=False)
    thread.start({"a": how(ends=(), max_tokens=100), "b": how(4, ends=())}, steps=60)
    thread.turn(3)
    thread.send(plan(1, preempt=(ref("b"),)))
    thread.send(plan(1, steps=5, decodes=(decode(ref("a"), BLOCKS - 2),)))
    thread.turn(80)
    assert thread.broken == [] and len(thread.tokens("a")) > 60


class Failing(SimulatedEngine):
    """Fails once at the result of a step, or at its submission; then computes."""

    fails_at, fails_on_submission = 0, False
    error: Exception = RuntimeError("as told")
    steps = 0

    def submit(self, rows: StepRows) -> StepTicket:
        self.steps += 1
        ticket, step = super().submit(rows), self.steps
        if step == self.fails_at and self.fails_on_submission:
            raise self.error
        return _Failing(self, ticket, step)


class _Failing:
    def __init__(self, engine: Failing, ticket: StepTicket, step: int) -> None:
        self._engine, self._ticket, self._step = engine, ticket, step

    def result(self) -> Sequence[Sampled | None]:
        if self._step == self._engine.fails_at:
            raise self._engine.error
        return self._ticket.result()


@pytest.mark.parametrize("on_submission", [False, True])
@pytest.mark.parametrize("fails_at", [1, 2, 5, 9, 10])
def test_a_step_that_fails_in_flight_is_computed_again_and_so_is_the_one_after_it(
    fails_at: int, on_submission: bool
) -> None:
    engine = Failing(**SIZES)
    engine.fails_at, engine.fails_on_submission = fails_at, on_submission
    thread = Thread(engine)
    samplings = {"a": how(SEED, max_tokens=30), "b": how(4, max_tokens=14, ends=())}
    thread.start(samplings)
    thread.turn(40)
    assert {name: thread.tokens(name) for name in samplings} == {
        name: answer(sampling) for name, sampling in samplings.items()
    }
    assert thread.ends() == {"a": FinishReason.STOP, "b": FinishReason.LENGTH}


def test_rows_of_a_lost_creditor_end_and_the_step_in_flight_goes_on_without_them() -> None:
    engine = Failing(**SIZES)
    engine.fails_at, engine.error = 4, CreditorLost("as told", creditor_id="worker-9")
    thread = Thread(engine)
    thread.start({"a": how(ends=()), "b": how(4, ends=())})
    thread.turn(3)
    held = thread.table.find(ref("b"))
    assert held is not None
    thread.lost = set(held.blocks)
    thread.turn(40)
    assert thread.tokens("a") == answer(how(ends=())) and len(thread.tokens("b")) == 3
    assert thread.ends() == {"a": FinishReason.LENGTH, "b": FinishReason.KV_LOST}


def test_own_blocks_before_lost_ones_are_free_again_once_the_step_in_flight_is_over() -> None:
    """The step in flight was a user of the lost blocks, and so of all blocks before them."""
    engine, lent = Failing(**SIZES | {"kv_blocks": 6}), range(6, 14)
    engine.fails_at, engine.error = 5, CreditorLost("as told", creditor_id="worker-9")
    thread = Thread(engine, borrowed=lent)
    thread.start({"a": how(ends=(), max_tokens=30)}, prompt=34, steps=8)
    thread.turn(4)
    held = thread.table.find(ref("a"))
    assert held is not None and max(held.blocks) >= 6
    thread.lost = set(lent)
    thread.turn(40)
    assert thread.ends() == {"a": FinishReason.KV_LOST}
    pool = thread.table.pool
    assert pool.free_blocks + pool.evictable_blocks == 6


def test_ends_are_acknowledged_while_their_row_is_computed_in_vain() -> None:
    thread = Thread(simulated())
    thread.start({"a": how(SEED, max_tokens=30), "b": how(4, max_tokens=14, ends=())})
    thread.turn_until_the_end("a")
    acknowledged = acknowledging(ref("a"))
    thread.door.post(lambda core, now_s: core.on_acknowledge(acknowledged, now_s), settles=False)
    thread.turn(40)
    assert thread.tokens("a") == answer(how(SEED, max_tokens=30)) and thread.table.find(ref("a")) is None
    assert len(thread.tokens("b")) == 14


SAMPLINGS = {
    "greedy": how(1, ends=(), temperature=0.0),
    "drawn": how(2, ends=(), temperature=0.8),
    "filtered": how(3, ends=(), top_p=0.9, top_k=20, min_p=0.01),
    "penalised": how(4, ends=(), temperature=0.0, frequency_penalty=0.6, repetition_penalty=1.3),
    "measured": how(5, ends=(), temperature=0.0, top_logprobs=2),
    "late": how(6, ends=(7,), temperature=0.0, min_tokens=5),
}


@pytest.mark.parametrize("names", [tuple(SAMPLINGS), ("greedy",), ("greedy", "drawn", "filtered")])
def test_a_models_answers_are_the_same(names: tuple[str, ...], make_model: ModelFactory) -> None:
    """Tokens stay with the engine from step to step; penalties are counted when they are known."""
    torch.set_num_threads(1)
    told = []
    for overlaps in (False, True):
        engine = TorchEngine(describe(make_model("llama")), kv_blocks=BLOCKS, block_tokens=BLOCK_TOKENS)
        engine.overlaps = overlaps
        thread = Thread(engine)
        thread.start({name: SAMPLINGS[name] for name in names})
        thread.turn(60)
        assert not thread.broken and set(thread.ends()) == set(names)
        told.append({name: thread.tokens(name) for name in names})
        thread.store.close(10.0)
    assert told[0] == told[1] and all(told[0].values())


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_guesses_change_no_answer(name: str, attention: AttentionMode, make_model: ModelFactory) -> None:
    """Rows of one sequence in one step see each other's keys; a wrong guess leaves none behind."""
    torch.set_num_threads(1)
    told: list[dict[str, list[int]]] = []

    def truth(one: SequenceRef) -> tuple[int, list[int]]:
        return 6 + list(SAMPLINGS).index(one.request_id), told[0][one.request_id]

    drafts = TrueDrafts(truth, Random(5))
    for given in (None, drafts):
        model = describe(make_model(name))
        engine = TorchEngine(model, kv_blocks=BLOCKS, block_tokens=BLOCK_TOKENS, attention=attention)
        thread = Thread(engine, drafts=given)
        thread.start(SAMPLINGS)
        thread.turn(60)
        assert not thread.broken and set(thread.ends()) == set(SAMPLINGS)
        told.append({each: thread.tokens(each) for each in SAMPLINGS})
        pool = thread.table.pool
        assert pool.free_blocks + pool.evictable_blocks == BLOCKS
        thread.store.close(10.0)
    assert told[0] == told[1] and min(drafts.kept, drafts.wrong) >= 5
