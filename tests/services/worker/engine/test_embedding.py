"""A sequence that embeds gets the model's own last hidden state at its end, on every way of computing it."""

import copy
import random

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
from tests.services.worker.conftest import ARCHITECTURES, VOCABULARY, new_model
from tests.services.worker.engine.rig import BLOCK_TOKENS, GREEDY

EMBEDS = Sampling(seed=0, max_tokens=1, temperature=0.0, top_logprobs=0, embeds=True)


@pytest.mark.parametrize("mode", ["auto", "torch"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_in_chunks_beside_others(architecture: str, mode: AttentionMode) -> None:
    dice = random.Random(7)
    model = new_model(architecture)
    prompt = [dice.randrange(VOCABULARY) for _ in range(23)]
    with torch.inference_mode():
        expected = model.model(input_ids=torch.tensor([prompt])).last_hidden_state[0, -1]
    described = describe(copy.deepcopy(model))
    engine = TorchEngine(described, kv_blocks=32, block_tokens=BLOCK_TOKENS, attention=mode)
    blocks, others = list(range(6)), [8, 9]
    engine.step([Row(prompt[:14], 0, blocks[:4], None)])
    chosen = SamplePoint(GREEDY, 0, 0, prompt[:5])
    mine = Row(prompt[14:], 14, blocks, SamplePoint(EMBEDS, 0, 0, prompt))
    first, second = engine.step([Row(prompt[:5], 0, others, chosen), mine])
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
