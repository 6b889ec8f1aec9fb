"""Packed rows and paged KV give transformers' own tokens, hidden states and embeddings, in any batch."""

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.core.costs import find_cost
from services.worker.core.sampling import Sampled, SamplePoint
from services.worker.engine.contract import Row
from services.worker.engine.engine import TorchEngine, carried, prefill_tokens_per_s, warm_up
from services.worker.engine.loading import describe
from services.worker.engine.native.library import AttentionMode
from services.worker.engine.sampler import with_hidden
from services.worker.engine.simulated import SimulatedEngine
from services.worker.kv.core.block_pool import BlockPool
from shared.errors import InternalError
from shared.messages.sequence import Sampling
from shared.messages.tokens import TokenLogprobs
from tests.services.worker.conftest import ARCHITECTURES, VOCABULARY, ModelFactory, new_model
from tests.services.worker.engine.rig import BLOCK_TOKENS, GREEDY, Sequences


def reference(model: Any, prompt: list[int], count: int, **settings: float) -> list[int]:
    """What `generate` says with transformers' own attention."""
    model.set_attn_implementation("eager")
    generated = model.generate(
        torch.tensor([prompt]), max_new_tokens=count, do_sample=False, use_cache=True, **settings
    )
    tokens: list[int] = generated[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_are_those_of_generate(architecture: str, make_model: ModelFactory) -> None:
    dice = random.Random(3)
    model = make_model(architecture)
    prompts = [[dice.randrange(VOCABULARY) for _ in range(length)] for length in (1, 3, 7, 18, 33, 50)]
    expected = [reference(model, prompt, 24) for prompt in prompts]
    pool = BlockPool(256, BLOCK_TOKENS)
    engine = TorchEngine(describe(model), kv_blocks=256, block_tokens=BLOCK_TOKENS)
    sequences = Sequences(engine, pool, prompts, GREEDY)
    everyone = list(range(len(prompts)))
    for step in range(60):
        if step in (9, 21):
            sequences.preempt(step % 4 + 1)
        if step == 15:
            sequences.preempt(5)
        chosen = [index for index in everyone if dice.random() < 0.8] or everyone
        sequences.step(chosen, most_tokens=dice.choice((1, 5, 11, 64)))
    assert [sequences.answer(index, 24) for index in everyone] == expected


@pytest.mark.parametrize(
    ("temperature", "kv"), [(0, torch.float32), (1.3, torch.float32), (1, torch.bfloat16), (1, torch.int8)]
)
def test_a_token_does_not_depend_on_what_else_is_in_the_batch(
    temperature: float, kv: torch.dtype, make_model: ModelFactory
) -> None:
    dice = random.Random(5)
    prompts = [[dice.randrange(VOCABULARY) for _ in range(length)] for length in (2, 9, 21, 40)]
    sampling = Sampling(seed=11, max_tokens=64, temperature=temperature, top_p=0.95, top_k=40)
    answers, pools = [], []
    for together in (True, False):
        model = replace(describe(make_model("llama")), kv_dtype=kv)
        engine = TorchEngine(model, kv_blocks=128, block_tokens=BLOCK_TOKENS)
        assert engine.pools[0][0].dtype is kv
        sequences = Sequences(engine, BlockPool(128, BLOCK_TOKENS), prompts, sampling)
        groups = [[0, 1, 2, 3]] if together else [[0], [1], [2], [3]]
        for group in groups:
            for _ in range(20):
                sequences.step(group, most_tokens=64 if together else 7)
        answers.append([sequences.answer(index, 14) for index in range(4)])
        pools.append(
            [pool[blocks[:5]] for blocks in sequences.blocks for pair in engine.pools for pool in pair]
        )
    assert answers[0] == answers[1]
    assert all(torch.equal(one, other) for one, other in zip(*pools, strict=True)), "the same bits of KV"


PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3}
ENDS = {"min_tokens": 18, "end_token_ids": (3, 8), "top_logprobs": 3}
PENALIZED = Sampling(seed=21, max_tokens=64, temperature=1.2, min_p=0.01, **PENALTIES, **ENDS)  # type: ignore[arg-type]


@pytest.mark.parametrize("architecture", ["llama", "opt"])
def test_an_answer_goes_on_as_it_would_have_after_a_preemption_and_on_another_worker(
    architecture: str, make_model: ModelFactory
) -> None:
    dice = random.Random(8)
    model = describe(make_model(architecture))
    prompts = [[dice.randrange(VOCABULARY) for _ in range(length)] for length in (2, 9, 31)]
    answers, logprobs = [], []
    for interrupted in (False, True):
        engine = TorchEngine(model, kv_blocks=128, block_tokens=BLOCK_TOKENS)
        sequences = Sequences(engine, BlockPool(128, BLOCK_TOKENS), prompts, PENALIZED)
        for step in range(24):
            if interrupted and step == 6:
                sequences.preempt(1)
            if interrupted and step == 13:
                sequences.engine = TorchEngine(model, kv_blocks=96, block_tokens=BLOCK_TOKENS)
                sequences.pool = BlockPool(96, BLOCK_TOKENS)
                sequences.blocks, sequences.computed = [[], [], []], [0, 0, 0]
            sequences.step([0, 1, 2], most_tokens=64)
        answers.append([sequences.answer(index, 24) for index in range(3)])
        logprobs.append(sequences.logprobs)
    assert answers[0] == answers[1]
    for one, other in zip(*logprobs, strict=True):
        assert len(one) == 24 and other == pytest.approx(one, abs=1e-3)
    for answer in answers[0]:
        assert {3, 8}.isdisjoint(answer[:18])


def test_computing_a_row_again_changes_nothing(make_model: ModelFactory) -> None:
    engine = TorchEngine(describe(make_model("llama")), kv_blocks=8, block_tokens=BLOCK_TOKENS)
    rows = [Row([1, 2, 3, 4, 5, 6], 0, [2, 5], SamplePoint(GREEDY, 0, 0))]
    assert engine.step(rows) == engine.step(rows)


@pytest.mark.parametrize("blocks", [1, 2, 9])
def test_warm_up_fits_the_smallest_pool(blocks: int, make_model: ModelFactory) -> None:
    engine = TorchEngine(describe(make_model("llama")), kv_blocks=blocks, block_tokens=1)
    warm_up(engine)
    assert engine.pools[0][0][: min(2, blocks)].any(), "it computed something"


@pytest.mark.parametrize(
    ("blocks", "took_s", "tokens_per_s"),
    [
        (6, (0.001, 0.5, 0.25), 24 / 0.25),
        (6, (3.0,), 24 / 3.0),
        (3, (), 0.0),
        (64, (0.1, 0.2, 0.4), 128 / 0.2),
    ],
    ids=["the fastest but the first", "a slow engine, once", "too small", "one chunk"],
)
def test_prefill_is_timed_before_serving(
    blocks: int, took_s: tuple[float, ...], tokens_per_s: float, make_model: ModelFactory
) -> None:
    times = [100.0 + sum(took_s[: (at + 1) // 2]) for at in range(2 * len(took_s))]
    engine = TorchEngine(describe(make_model("llama")), kv_blocks=blocks, block_tokens=BLOCK_TOKENS)
    assert prefill_tokens_per_s(engine, blocks, iter(times).__next__) == pytest.approx(tokens_per_s)


class LinearEngine(SimulatedEngine):
    """Its prompts take a fixed time, and a time for each token."""

    def __init__(self, fixed_s: float, token_s: float, max_positions: int) -> None:
        sizes: dict[str, Any] = {"vocabulary": 64, "kv_blocks": 9000, "block_tokens": 16}
        super().__init__(**sizes, max_positions=max_positions, cost=find_cost("opt-13b-a100"))
        self.now_s, self._fixed_s, self._token_s = 0.0, fixed_s, token_s

    def step(self, rows: Sequence[Row]) -> list[Sampled | None]:
        self.now_s += self._fixed_s + self._token_s * sum(len(row.tokens) for row in rows)
        return []


@pytest.mark.parametrize(
    ("fixed_s", "token_s", "positions", "tokens"),
    [
        (0.005, 1e-6, 131_072, 8192),
        (0.005, 1e-4, 131_072, 2048),
        (0.01, 1.0, 131_072, 512),
        (0.005, 1e-4, 512, 512),
    ],
    ids=["a fast one", "a quarter of a second at most", "a slow one", "a model of short texts"],
)
def test_a_step_has_as_many_tokens_as_a_gpu_computes_in_a_quarter_of_a_second(
    fixed_s: float, token_s: float, positions: int, tokens: int
) -> None:
    engine = LinearEngine(fixed_s, token_s, positions)
    assert carried(engine, engine.kv_blocks, lambda: engine.now_s) == (140, tokens)
    assert carried(engine, 100, lambda: engine.now_s)[0] == 64 and carried(engine, 1 << 20)[0] == 256


EMBEDS = Sampling(seed=0, max_tokens=1, temperature=0.0, top_logprobs=0, embeds=True)
EVERY = 3
Found = list[tuple[int, int, int, np.ndarray]]
"""(sequence, first token of its row, tokens it had, state)."""


def engine_of(module: torch.nn.Module, attention: AttentionMode, states_every: int = 0) -> TorchEngine:
    described = describe(copy.deepcopy(module))
    sizes: dict[str, Any] = {"kv_blocks": 32, "block_tokens": BLOCK_TOKENS, "states_every": states_every}
    return TorchEngine(described, attention=attention, **sizes)


@pytest.mark.parametrize("mode", ["auto", "torch"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_prompt_in_chunks_beside_others_is_embedded(architecture: str, mode: AttentionMode) -> None:
    dice = random.Random(7)
    model = new_model(architecture)
    prompt = [dice.randrange(VOCABULARY) for _ in range(23)]
    with torch.inference_mode():
        expected = model.model(input_ids=torch.tensor([prompt])).last_hidden_state[0, -1]
    engine, blocks = engine_of(model, mode), list(range(6))
    engine.step([Row(prompt[:14], 0, blocks[:4], None)])
    chosen = SamplePoint(GREEDY, 0, 0, prompt[:5])
    mine = Row(prompt[14:], 14, blocks, SamplePoint(EMBEDS, 0, 0, prompt))
    first, second = engine.step([Row(prompt[:5], 0, [8, 9], chosen), mine])
    assert first is not None and first.logprobs is None
    assert second is not None and second.logprobs is not None
    found = np.frombuffer(second.logprobs.hidden, "<f4")
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-3, atol=1e-4)


def test_what_is_not_finite_is_no_embedding() -> None:
    sampled = Sampled(3, TokenLogprobs(-1.0))
    points = [SamplePoint(EMBEDS, 0, 0), SamplePoint(EMBEDS, 0, 0), SamplePoint(GREEDY, 0, 0)]
    hidden = torch.tensor([[1.0, 2.0], [float("nan"), 0.0], [5.0, 6.0]])
    first, second, third = with_hidden([sampled, sampled, Sampled(4)], points, hidden)
    assert first is not None and first.logprobs is not None
    assert np.frombuffer(first.logprobs.hidden, "<f4").tolist() == [1.0, 2.0]
    assert second is None and third == Sampled(4)
    with pytest.raises(InternalError):
        with_hidden([sampled], points[:1], None)


def states_of(engine: TorchEngine, prompts: list[list[int]], steps: int) -> tuple[list[list[int]], Found]:
    """Return the sequences at the end, and the states that came."""
    tokens = [list(prompt) for prompt in prompts]
    found: Found = []
    firsts = [0] * len(prompts)
    for _ in range(steps):
        rows = []
        for index, prompt in enumerate(prompts):
            point = SamplePoint(GREEDY, 0, len(tokens[index]) - len(prompt), tokens[index])
            blocks = list(range(16 * index, 16 * index + 16))
            rows.append(Row(tokens[index][firsts[index] :], firsts[index], blocks, point))
        for index, sampled in enumerate(engine.step(rows)):
            assert sampled is not None
            if sampled.state is not None:
                state = np.frombuffer(sampled.state, np.float16)
                found.append((index, firsts[index], len(tokens[index]), state))
            firsts[index] = len(tokens[index])
            tokens[index].append(sampled.token)
    return tokens, found


@pytest.mark.parametrize(("name", "mode"), [("llama", "native"), ("llama", "torch"), ("qwen3", "torch")])
def test_states_are_those_of_the_middle_layer(
    make_model: ModelFactory, name: str, mode: AttentionMode
) -> None:
    """They come with the first token and with one in three, and change no token."""
    module, prompts = make_model(name), [[5, 9, 2, 7, 1], [3, 3, 8]]
    tokens, found = states_of(engine_of(module, mode, EVERY), prompts, steps=8)
    assert [(index, seen - len(prompts[index])) for index, _, seen, _ in found] == [
        (index, count) for count in (0, EVERY, 2 * EVERY) for index in (0, 1)
    ]
    assert states_of(engine_of(module, mode), prompts, steps=8) == (tokens, [])
    reference = copy.deepcopy(module)
    reference.set_attn_implementation("eager")
    layer = (module.config.get_text_config().num_hidden_layers - 1) // 2
    for index, first, seen, state in found:
        with torch.inference_mode():
            output = reference(torch.tensor([tokens[index][:seen]]), output_hidden_states=True)
        expected = output.hidden_states[layer + 1][0, first:seen].mean(0)
        np.testing.assert_allclose(state, expected.numpy(), rtol=5e-3, atol=5e-3)
