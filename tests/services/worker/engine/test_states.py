"""Hidden states handed out while answers are written: the model's own, whichever way it is computed."""

import copy

import numpy as np
import pytest
import torch

from services.worker.core.sampling import SamplePoint
from services.worker.engine.contract import Row
from services.worker.engine.engine import TorchEngine
from services.worker.engine.loading import describe
from services.worker.engine.native.library import AttentionMode
from shared.messages.sequence import Sampling
from tests.services.worker.conftest import VOCABULARY, ModelFactory

BLOCK_TOKENS, EVERY = 4, 3
GREEDY = Sampling(seed=0, max_tokens=64, temperature=0.0)
Found = list[tuple[int, int, int, np.ndarray]]
"""(sequence, first token of its row, tokens it had, state)."""
WAYS: tuple[tuple[str, AttentionMode], ...] = (("llama", "native"), ("llama", "torch"), ("qwen3", "torch"))


def engine_of(module: torch.nn.Module, attention: AttentionMode, every: int) -> TorchEngine:
    described = describe(copy.deepcopy(module))
    return TorchEngine(
        described, kv_blocks=32, block_tokens=BLOCK_TOKENS, attention=attention, states_every=every
    )


def states_of(engine: TorchEngine, prompts: list[list[int]], steps: int) -> tuple[list[list[int]], Found]:
    """The sequences as they are in the end, and what came."""
    tokens = [list(prompt) for prompt in prompts]
    found: Found = []
    blocks = [list(range(16 * index, 16 * index + 16)) for index in range(len(prompts))]
    firsts = [0] * len(prompts)
    for _ in range(steps):
        rows = []
        for index, prompt in enumerate(prompts):
            point = SamplePoint(GREEDY, 0, len(tokens[index]) - len(prompt), tokens[index])
            rows.append(Row(tokens[index][firsts[index] :], firsts[index], blocks[index], point))
        for index, sampled in enumerate(engine.step(rows)):
            assert sampled is not None
            if sampled.state is not None:
                seen = len(tokens[index])
                found.append((index, firsts[index], seen, np.frombuffer(sampled.state, np.float16)))
            firsts[index] = len(tokens[index])
            tokens[index].append(sampled.token)
    return tokens, found


@pytest.mark.parametrize(("name", "attention"), WAYS)
def test_states_are_those_of_the_middle_layer(
    make_model: ModelFactory, name: str, attention: AttentionMode
) -> None:
    module = make_model(name)
    prompts = [[5, 9, 2, 7, 1], [3, 3, 8]]
    tokens, found = states_of(engine_of(module, attention, EVERY), prompts, steps=8)
    assert [(index, seen - len(prompts[index])) for index, _, seen, _ in found] == [
        (index, count) for count in (0, EVERY, 2 * EVERY) for index in (0, 1)
    ], "with the first token, and with one in three"
    reference = copy.deepcopy(module)
    reference.set_attn_implementation("eager")
    layer = (module.config.get_text_config().num_hidden_layers - 1) // 2
    for index, first, seen, state in found:
        with torch.inference_mode():
            output = reference(torch.tensor([tokens[index][:seen]]), output_hidden_states=True)
        expected = output.hidden_states[layer + 1][0, first:seen].mean(0)
        np.testing.assert_allclose(state, expected.numpy(), rtol=5e-3, atol=5e-3)


def test_tokens_are_the_same_with_and_without(make_model: ModelFactory) -> None:
    module = make_model("llama")
    random = np.random.default_rng(1)
    prompts = [random.integers(1, VOCABULARY, size).tolist() for size in (5, 11)]
    tapped, states = states_of(engine_of(module, "torch", 1), prompts, steps=12)
    plain, none = states_of(engine_of(module, "torch", 0), prompts, steps=12)
    assert tapped == plain
    assert len(states) == 24
    assert not none
