"""The engine above the seam: its answers are those of the tokens in their blocks, in any order of steps.

At its start, what is not as expected is refused in a sentence."""

import pickle
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.core.sampling import Sampled, SamplePoint
from services.worker.engine.contract import AttendingEngine, ConstrainedEngine, OverlappingEngine, Row
from services.worker.engine.grammar_masks import RowMasks
from services.worker.engine.sampler import Logits
from services.worker.engine.vllm.draw import StepDraw
from services.worker.engine.vllm.engine import VllmEngine
from services.worker.engine.vllm.requests import NULL_BLOCKS, NewRequest, StepRequests
from services.worker.engine.vllm.runner import check_device, check_quantised
from services.worker.engine.vllm.steps import KvPart, as_it_lies, check_groups
from services.worker.kv.store import CacheableEngine
from shared.errors import ConfigError
from shared.grammars import Words
from shared.messages.sequence import Sampling
from tests.services.worker.by_hand import Thread

VOCABULARY = 64


class Broken(Exception):
    """A step that was told to fail."""


def next_token(context: Sequence[int], adapter: str = "") -> int:
    """What a greedy answer goes on with."""
    return crc32(bytes(context) + adapter.encode()) % VOCABULARY


class _Kept:
    def __init__(self, request: NewRequest) -> None:
        self.tokens = [int(token) for token in request.tokens]
        self.prompt_tokens = len(self.tokens)
        self.blocks = list(request.blocks)
        self.computed, self.adapter = request.computed, request.adapter


class TokenRunner:
    """A `ModelRunner`. `break_next`: "before" or "after" the next step's requests are known, or when it is
    to "sample", it fails."""

    version = "0"
    overlaps = True
    max_positions = 1024
    vocabulary = VOCABULARY
    dtype = torch.float32
    layout = "tokens"

    def __init__(self, kv_blocks: int, block_tokens: int) -> None:
        self._blocks = torch.zeros(kv_blocks + NULL_BLOCKS, block_tokens, dtype=torch.int32)
        self._requests: dict[str, _Kept] = {}
        self.break_next = ""
        self._computed_step: tuple[StepRequests, list[str], torch.Tensor] | None = None
        self.closed = False
        self.most_requests = self.new = self.continued = 0

    @property
    def kv(self) -> Sequence[torch.Tensor]:
        return [self._blocks]

    def breaks(self, when: str) -> bool:
        is_now = self.break_next == when
        self.break_next = "" if is_now else self.break_next
        return is_now

    def compute(self, step: StepRequests) -> None:
        counts = step.counts
        assert self._computed_step is None, "each step is sampled before the next one"
        if self.breaks("before"):
            raise Broken
        for name in step.finished:
            self._requests.pop(name, None)
        for request in step.new:
            assert request.name not in self._requests
            self._requests[request.name] = _Kept(request)
        for each in step.continued:
            kept = self._requests[each.name]
            kept.blocks += each.more_blocks
            kept.computed = each.computed
            assert len(kept.tokens) == kept.prompt_tokens + each.outputs == each.computed + 1
        assert set(counts) == set(self._requests), "requests are kept that no step has"
        self.new, self.continued = self.new + len(step.new), self.continued + len(step.continued)
        self.most_requests = max(self.most_requests, len(counts))
        if self.breaks("after"):
            raise Broken
        names = sorted(counts, key=lambda name: crc32(name.encode()))
        logits = torch.stack([self._computed(self._requests[name], counts[name]) for name in names])
        self._computed_step = step, names, logits

    def sample(self, draw: StepDraw) -> None:
        computed, self._computed_step = self._computed_step, None
        if self.breaks("sample") or computed is None:
            raise Broken
        step, names, logits = computed
        for name, token in zip(names, draw(Logits(logits), names).tolist(), strict=True):
            kept = self._requests[name]
            if kept.computed + step.counts[name] >= kept.prompt_tokens:
                kept.tokens.append(token)

    def close(self) -> None:
        self.closed = True

    def _computed(self, kept: _Kept, count: int) -> torch.Tensor:
        block_tokens = self._blocks.shape[1]
        end = kept.computed + count
        assert 0 not in kept.blocks
        for position in range(kept.computed, end):
            block, offset = divmod(position, block_tokens)
            self._blocks[kept.blocks[block], offset] = kept.tokens[position]
        context = self._blocks[kept.blocks].reshape(-1)[:end].tolist()
        token = torch.tensor(next_token(context, kept.adapter))
        return torch.nn.functional.one_hot(token, VOCABULARY).float()


BLOCK_TOKENS, BLOCKS = 4, 96
GREEDY = Sampling(seed=0, max_tokens=32, temperature=0.0)


def make(**most: int) -> tuple[VllmEngine, TokenRunner]:
    runner, bounds = TokenRunner(BLOCKS, BLOCK_TOKENS), {"max_rows": 8, "max_step_tokens": 32} | most
    how: dict[str, Any] = {"weights": "w", "block_tokens": BLOCK_TOKENS, **bounds}
    return VllmEngine(runner, **how), runner


@dataclass
class Driven:
    """One sequence, as a worker's core would lead it."""

    tokens: list[int]
    adapter: str = ""
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
        tokens, asked = self.tokens[self.computed : end], point if end == len(self.tokens) else None
        return Row(tokens, self.computed, self.blocks, asked, adapter=self.adapter)

    def preempt(self, free: list[int]) -> None:
        free[:0] = self.blocks
        self.blocks, self.computed = array("i"), 0


def expected(prompt: list[int], count: int, adapter: str = "") -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, adapter))
    return tokens


EVENTS = st.sampled_from(("", "before", "after", "sample", "pre"))
STEPS = st.lists(
    st.tuples(st.permutations(range(4)), st.integers(1, 4), st.integers(1, 40), EVENTS), max_size=24
)


PROMPTS = st.lists(st.lists(st.integers(0, 63), min_size=1, max_size=40), min_size=4, max_size=4)


@given(PROMPTS, STEPS)
def test_any_order_of_steps(prompts: list[list[int]], steps: list[tuple[list[int], int, int, str]]) -> None:
    (engine, runner), free = make(), list(range(BLOCKS))
    driven = [Driven(list(prompt), "ab"[at % 2 :]) for at, prompt in enumerate(prompts)]
    for order, count, chunk, event in steps:
        chosen = [driven[index] for index in order[:count]]
        if event == "pre":
            chosen[0].preempt(free)
        rows = [each.row(free, chunk) for each in chosen]
        if event in ("before", "after", "sample"):
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
        assert each.tokens == expected(prompt, len(each.tokens) - len(prompt), each.adapter)


def decode(engine: VllmEngine, driven: list[Driven], free: list[int]) -> None:
    rows = [each.row(free, 64) for each in driven]
    for each, row, sampled in zip(driven, rows, engine.step(rows), strict=True):
        assert sampled is not None
        each.computed += len(row.tokens)
        each.tokens.append(sampled.token)


def test_an_answer_that_goes_on_is_not_told_anew() -> None:
    (engine, runner), free = make(), list(range(BLOCKS))
    driven = [Driven([1, 2, 3]), Driven([4])]
    for _ in range(10):
        decode(engine, driven, free)
    assert (runner.new, runner.continued) == (2, 18)


def test_steps_larger_than_the_buffers() -> None:
    engine, runner = make(max_rows=3, max_step_tokens=16)
    free = list(range(BLOCKS))
    driven = [Driven([seed] * 37, str(seed)) for seed in range(5)]
    for _ in range(3):
        decode(engine, driven, free)
    assert runner.most_requests == 3
    for seed, each in enumerate(driven):
        assert each.tokens == expected([seed] * 37, 3, str(seed))


def test_a_row_with_another_adapter_is_a_new_request() -> None:
    (engine, runner), free = make(), list(range(BLOCKS))
    one = Driven([1, 2, 3], "a")
    decode(engine, [one], free)
    one.adapter = "b"
    decode(engine, [one], free)
    assert (runner.new, runner.continued) == (2, 0)


def test_what_it_can() -> None:
    """Its blocks are copied and its answers keep to grammars; it attends to no other worker's keys."""
    engine, runner = make()
    assert isinstance(engine, CacheableEngine) and isinstance(engine, ConstrainedEngine)
    assert isinstance(engine, OverlappingEngine)
    assert not isinstance(engine, AttendingEngine) and engine.records().record_bytes == 4 * BLOCK_TOKENS
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


def by_thread(
    samplings: dict[str, Sampling], *, overlaps: bool, breaks: str = "", prompt: int = 6, **most: int
) -> tuple[dict[str, list[int]], TokenRunner]:
    """Answers of a worker's loop around the engine. `breaks`: at each fourth turn."""
    engine, runner = make(**most)
    engine.overlaps = overlaps
    thread = Thread(engine)
    thread.start(samplings, prompt=prompt)
    for turn in range(60):
        runner.break_next = breaks if turn % 4 == 3 else runner.break_next
        thread.turn()
    assert not thread.broken and set(thread.ends()) == set(samplings)
    pool = thread.table.pool
    assert pool.free_blocks + pool.evictable_blocks == BLOCKS
    return {name: thread.tokens(name) for name in samplings}, runner


def long(max_tokens: int = 24, **how: Any) -> Sampling:
    return Sampling(seed=1, **{"max_tokens": max_tokens, "temperature": 0.0} | how)


PLAIN, _ = by_thread({"a": long()}, overlaps=False)
SAMPLINGS = {
    "a": long(),
    "ending": long(end_token_ids=tuple(range(8))),
    "short": long(max_tokens=9),
    "drawn": long(temperature=0.9, top_p=0.9),
    "penalised": long(frequency_penalty=1.5, repetition_penalty=1.2),
    "measured": long(top_logprobs=2),
}


@pytest.mark.parametrize("names", [tuple(SAMPLINGS), ("a", "short"), ("penalised",)])
def test_steps_in_flight_change_no_answer_and_no_request(names: tuple[str, ...]) -> None:
    """Tokens go to the next step in the runner: a request is told once, with its prompt."""
    samplings = {name: SAMPLINGS[name] for name in names}
    alone, _ = by_thread(samplings, overlaps=False)
    answers, runner = by_thread(samplings, overlaps=True, max_step_tokens=64)
    assert answers == alone and runner.new == len(names)
    assert "penalised" not in names or answers["penalised"] != PLAIN["a"]


def test_an_end_in_flight_is_computed_once_in_vain() -> None:
    ends = {"a": long(end_token_ids=(PLAIN["a"][7],))}
    answers, runner = by_thread(ends, overlaps=True)
    assert answers["a"] == PLAIN["a"][: PLAIN["a"].index(PLAIN["a"][7]) + 1]
    assert runner.continued == len(answers["a"])


@pytest.mark.parametrize("breaks", ["before", "after", "sample"])
def test_a_step_that_fails_in_flight_is_computed_again(breaks: str) -> None:
    samplings = {name: SAMPLINGS[name] for name in ("a", "penalised", "short")}
    alone, _ = by_thread(samplings, overlaps=False)
    answers, runner = by_thread(samplings, overlaps=True, breaks=breaks)
    assert answers == alone and runner.new > 2 * len(samplings)


@pytest.mark.parametrize(("most", "requests"), [({"max_rows": 2}, 2), ({"max_step_tokens": 5}, 5)])
def test_steps_in_parts_wait_for_the_tokens_before_them(most: dict[str, Any], requests: int) -> None:
    answers, runner = by_thread(SAMPLINGS, overlaps=True, **most)
    assert answers == by_thread(SAMPLINGS, overlaps=False)[0] and runner.most_requests == requests


TEXT = list(range(40))


def some_points() -> list[SamplePoint]:
    """Greedy, seeded, penalized, with log-probabilities, constrained."""
    ways: Sequence[dict[str, object]] = (
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.8},
        {"temperature": 0.0, "repetition_penalty": 4.0},
        {"temperature": 1.0, "frequency_penalty": 2.0, "top_logprobs": 2},
        {"temperature": 0.0},
    )
    return [
        SamplePoint(Sampling(seed=index, max_tokens=99, **how), 0, 30, TEXT)  # type: ignore[arg-type]
        for index, how in enumerate(ways)
    ]


def some_masks() -> RowMasks:
    """The last row may have tokens 5 and 6 only."""

    def find(at: int, words: Words) -> None:
        words[at] = np.uint32(0b1100000)

    return RowMasks([4], VOCABULARY // 32, find)


def test_sent_and_drawn_there() -> None:
    names = [f"row-{index}" for index in range(5)]
    values = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(3))
    order = ["row-3", "chunk", "row-0", "row-4", "row-1", "row-2"]
    here = StepDraw(names, some_points(), some_masks())
    there: StepDraw = pickle.loads(pickle.dumps(here))
    tokens = here(Logits(values.clone()), order).tolist()
    assert there(Logits(values.clone()), order).tolist() == tokens
    assert here.chosen is not None and there.chosen is not None
    assert there.chosen.answers() == here.chosen.answers()
    assert here.chosen.tokens.tolist() == [tokens[order.index(name)] for name in names]
    assert tokens[1] == 0 and tokens[3] in (5, 6) and tokens[2] == int(values[2].argmax())


def test_rows_that_want_the_likeliest_alone_have_it_whatever_their_order() -> None:
    """Without a copy of the logits; one that is not finite has none, and one that is to go on does."""
    values = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(4))
    values[2, 7] = float("nan")
    end = int(values[3].argmax())
    goes_on = Sampling(seed=0, max_tokens=99, temperature=0.0, min_tokens=31, end_token_ids=(end,))
    greedy = Sampling(seed=0, max_tokens=99, temperature=0.0)
    order = ["chunk", "b", "a", "c"]
    wanted = {name: SamplePoint(greedy, 0, 30, TEXT) for name in ("a", "b", "c")}
    alone = StepDraw(list(wanted), list(wanted.values()))
    tokens = alone(Logits(values.clone()), order).tolist()
    assert (tokens[0], tokens[1], tokens[3]) == (0, int(values[1].argmax()), end)
    assert 0 <= tokens[2] < VOCABULARY and alone.chosen is not None and alone.chosen.answers()[0] is None
    wanted["c"] = SamplePoint(goes_on, 0, 30, TEXT)
    beside = StepDraw(list(wanted), list(wanted.values()))
    assert beside(Logits(values.clone()), order).tolist()[:2] == tokens[:2]
    assert beside.chosen is not None and beside.chosen.answers()[2] not in (None, Sampled(end))


LAYERS, KV_BLOCKS, HEADS, BLOCK_SIZE, CONTENT = 3, 5, 2, 4, 6
SIZES = {"L": LAYERS, "B": KV_BLOCKS, "H": HEADS, "N": BLOCK_SIZE, "C": CONTENT}


def layer_of(layout: str) -> torch.Tensor:
    """Layer 1 of a KV that lies in this order, told as vLLM tells it: blocks, heads, tokens, content."""
    whole = torch.arange(LAYERS * KV_BLOCKS * HEADS * BLOCK_SIZE * CONTENT).view(
        *(SIZES[axis] for axis in layout)
    )
    return whole.permute(*(layout.index(axis) for axis in "LBHNC"))[1]


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_a_block_is_one_piece_of_memory(layout: str) -> None:
    """LBHNC is what vLLM has on a CPU, LBNHC what it has on most GPUs."""
    told = layer_of(layout)
    kv = as_it_lies(told)
    assert kv.is_contiguous() and kv.data_ptr() == told.data_ptr()
    for block in range(KV_BLOCKS):
        piece = kv[block].flatten()
        assert torch.equal(piece, torch.arange(int(piece[0]), int(piece[0]) + HEADS * BLOCK_SIZE * CONTENT))
        assert set(piece.tolist()) == set(told[block].flatten().tolist())


@pytest.mark.parametrize("layout", ["LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_blocks_in_several_pieces_are_refused(layout: str) -> None:
    with pytest.raises(ConfigError, match="set VLLM_KV_CACHE_LAYOUT=LBNHC"):
        as_it_lies(layer_of(layout))


def test_keys_apart_from_values_are_refused() -> None:
    """As older backends had them: `[2, blocks, ...]`, told with the blocks first."""
    with pytest.raises(ConfigError, match="does not lie block behind block"):
        as_it_lies(torch.zeros(2, KV_BLOCKS, BLOCK_SIZE, HEADS).transpose(0, 1))


def test_devices_and_ranks_that_cannot_be() -> None:
    check_device("cpu", "cpu", 2)
    check_device("cuda", "cuda:1", 1)
    with pytest.raises(ConfigError, match=r"built for cpu: set worker\.device cpu"):
        check_device("cpu", "cuda", 1)
    with pytest.raises(ConfigError, match=r"on a CPU only: set vllm\.tensor_parallel 1"):
        check_device("cuda", "cuda", 2)


def test_a_quantised_checkpoint_is_not_computed_in_32_bits() -> None:
    for kind, dtype in (("awq", torch.bfloat16), (None, torch.float32)):
        check_quantised(SimpleNamespace(quantization=kind, dtype=dtype))
    with pytest.raises(ConfigError, match=r"weights in awq with 16 bits: set worker\.dtype bfloat16"):
        check_quantised(SimpleNamespace(quantization="awq", dtype=torch.float32))


def test_a_model_of_several_tables_is_refused() -> None:
    """What a group is, is known by the name of its class alone."""
    kinds = (type(name, (), {})() for name in ("FullAttentionSpec", "MambaSpec"))
    attention, mamba = (SimpleNamespace(kv_cache_spec=kind) for kind in kinds)
    check_groups([attention])
    for groups in ([attention, attention], [mamba], []):
        with pytest.raises(ConfigError, match="one table of blocks for a sequence"):
            check_groups(groups)


def test_mapped_kv_is_one_memory_also_once_its_file_is_gone(tmp_path: Path) -> None:
    part = KvPart(str(tmp_path / "0-0"), (3, 2, 4), torch.bfloat16)
    one, other = part.mapped(), part.mapped()
    (tmp_path / "0-0").unlink()
    kept = torch.zeros(3, 2, 4, dtype=torch.bfloat16)
    alias = kept  # as a layer has it
    kept.set_(one.untyped_storage(), 0, one.shape, one.stride())
    alias[1] = 7.0
    assert torch.equal(other[1], torch.full((2, 4), 7.0, dtype=torch.bfloat16))
    assert not other[0].any() and not other[2].any()
