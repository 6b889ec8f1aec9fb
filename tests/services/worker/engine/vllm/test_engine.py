"""The engine above the seam: whatever steps rows come in, answers are those of the tokens in their blocks."""

from array import array
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.core.sampling import SamplePoint
from services.worker.engine.contract import AttendingEngine, ConstrainedEngine, Row
from services.worker.engine.vllm.engine import VllmEngine
from services.worker.kv.store import CacheableEngine
from shared.messages.sequence import Sampling
from tests.services.worker.engine.vllm.token_runner import Broken, TokenRunner, next_token

BLOCK_TOKENS, BLOCKS = 4, 96
GREEDY = Sampling(seed=0, max_tokens=32, temperature=0.0)


def make(*, max_rows: int = 8, max_step_tokens: int = 32) -> tuple[VllmEngine, TokenRunner]:
    runner = TokenRunner(BLOCKS, BLOCK_TOKENS)
    engine = VllmEngine(
        runner,
        weights="w",
        block_tokens=BLOCK_TOKENS,
        max_rows=max_rows,
        max_step_tokens=max_step_tokens,
    )
    return engine, runner


@dataclass
class Driven:
    """One sequence, as a worker's core would lead it."""

    tokens: list[int]
    prompt_tokens: int = 0
    computed: int = 0
    blocks: "array[int]" = field(default_factory=lambda: array("i"))

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    def row(self, free: list[int], chunk: int) -> Row:
        end = min(len(self.tokens), self.computed + chunk)
        while len(self.blocks) * BLOCK_TOKENS < end:
            self.blocks.append(free.pop())
        point = SamplePoint(GREEDY, 0, end - self.prompt_tokens, self.tokens)
        is_last = end == len(self.tokens)
        return Row(self.tokens[self.computed : end], self.computed, self.blocks, point if is_last else None)

    def preempt(self, free: list[int]) -> None:
        free[:0] = self.blocks
        self.blocks, self.computed = array("i"), 0


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens


steps = st.lists(
    st.tuples(
        st.permutations(range(4)),
        st.integers(1, 4),
        st.integers(1, 40),
        st.sampled_from(("", "before", "after", "pre")),
    ),
    max_size=24,
)


@given(
    prompts=st.lists(st.lists(st.integers(0, 63), min_size=1, max_size=40), min_size=4, max_size=4),
    steps=steps,
)
def test_any_order_of_steps(prompts: list[list[int]], steps: list[tuple[list[int], int, int, str]]) -> None:
    engine, runner = make()
    free = list(range(BLOCKS))
    driven = [Driven(list(prompt)) for prompt in prompts]
    for order, count, chunk, event in steps:
        chosen = [driven[index] for index in order[:count]]
        if event == "pre":
            chosen[0].preempt(free)
        rows = [each.row(free, chunk) for each in chosen]
        if event in ("before", "after"):
            runner.break_next = event
            with pytest.raises(Broken):
                engine.step(rows)
        for each, row, sampled in zip(chosen, rows, engine.step(rows), strict=True):
            each.computed += len(row.tokens)
            if row.point is not None:
                assert sampled is not None
                each.tokens.append(sampled.token)
            else:
                assert sampled is None
    for each, prompt in zip(driven, prompts, strict=True):
        assert each.tokens == expected(prompt, len(each.tokens) - len(prompt))


def decode(engine: VllmEngine, driven: list[Driven], free: list[int]) -> None:
    rows = [each.row(free, 64) for each in driven]
    for each, row, sampled in zip(driven, rows, engine.step(rows), strict=True):
        assert sampled is not None
        each.computed += len(row.tokens)
        each.tokens.append(sampled.token)


def test_an_answer_that_goes_on_is_not_told_anew() -> None:
    engine, runner = make()
    free = list(range(BLOCKS))
    driven = [Driven([1, 2, 3]), Driven([4])]
    for _ in range(10):
        decode(engine, driven, free)
    assert (runner.new, runner.continued) == (2, 18)


def test_steps_larger_than_the_buffers() -> None:
    engine, runner = make(max_rows=3, max_step_tokens=16)
    free = list(range(BLOCKS))
    driven = [Driven([seed] * 37) for seed in range(5)]
    for _ in range(3):
        decode(engine, driven, free)
    assert runner.most_requests == 3
    for seed, each in enumerate(driven):
        assert each.tokens == expected([seed] * 37, 3)


def test_what_it_can() -> None:
    """Its blocks are copied and its answers keep to grammars; nobody else's keys are attended to."""
    engine, runner = make()
    kinds: tuple[type, ...] = (CacheableEngine, ConstrainedEngine)
    assert all(isinstance(engine, kind) for kind in kinds)
    assert not isinstance(engine, AttendingEngine)
    assert (engine.kv_blocks, engine.records().record_bytes) == (BLOCKS, 4 * BLOCK_TOKENS)
    engine.close()
    assert runner.closed


def test_copied_blocks_are_as_good_as_computed_ones() -> None:
    engine, _ = make()
    free = list(range(BLOCKS))
    one = Driven(list(range(22)))
    for _ in range(4):
        decode(engine, [one], free)
    records = engine.records()
    moved = array("i", [free.pop() for _ in one.blocks])
    held = [memoryview(bytearray(records.record_bytes)) for _ in one.blocks]
    rows = [np.frombuffer(each, dtype=np.uint8) for each in held]
    records.read(one.blocks, rows)
    records.write(rows, moved)
    one.blocks = moved
    for _ in range(4):
        decode(engine, [one], free)
    assert one.tokens == expected(list(range(22)), 8)
