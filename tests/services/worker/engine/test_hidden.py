"""Hidden states and embeddings are the model's own, whichever way it is computed."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.core.sampling import Sampled, SamplePoint
from services.worker.engine.contract import Row
from services.worker.engine.engine import TorchEngine
from services.worker.engine.loading import describe
from services.worker.engine.native.library import AttentionMode
from services.worker.engine.sampler import with_hidden
from shared.errors import InternalError
from shared.messages.sequence import Sampling
from shared.messages.tokens import TokenLogprobs
from tests.services.worker.conftest import ARCHITECTURES, VOCABULARY, ModelFactory, new_model
from tests.services.worker.engine.rig import BLOCK_TOKENS, GREEDY

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
