"""The fast path says what transformers' modules say, and steps aside for what it does not know."""

import copy

import pytest
import torch

from services.worker.engine.attention import PagedAttention
from services.worker.engine.forward import Forward, LlamaForward, TransformersForward, is_plain, make_forward
from services.worker.engine.loading import LoadedModel, describe
from services.worker.engine.spans import Span
from tests.services.worker.conftest import VOCABULARY, ModelFactory

SPANS = [[Span(0, 9, [3, 1, 4])], [Span(9, 1, [3, 1, 4]), Span(0, 5, [0, 2])]]


def paged_attention(model: LoadedModel) -> PagedAttention:
    return PagedAttention(
        model.layers,
        kv_blocks=8,
        block_tokens=4,
        dtype=model.dtype,
        device=torch.device("cpu"),
        mode="torch",
    )


def logits_of(forward: Forward, attention: PagedAttention) -> torch.Tensor:
    """Of two steps: a prompt, then its decode beside another prompt."""
    found = []
    generator = torch.Generator().manual_seed(5)
    for spans in SPANS:
        attention.begin(spans, sum(span.count == 1 for span in spans))
        positions = [span.first_position + offset for span in spans for offset in range(span.count)]
        tokens = torch.randint(0, VOCABULARY, (len(positions),), generator=generator)
        with torch.inference_mode():
            found.append(
                forward(tokens, torch.tensor(positions), torch.tensor([0, len(positions) - 1])).values.clone()
            )
    return torch.cat(found)


def test_logits_are_those_of_transformers_modules(make_model: ModelFactory) -> None:
    described = describe(copy.deepcopy(make_model("llama")))
    slow_attention, fast_attention = paged_attention(described), paged_attention(described)
    expected = logits_of(TransformersForward(described, slow_attention), slow_attention)
    fast = make_forward(described, fast_attention)
    assert isinstance(fast, LlamaForward)
    torch.testing.assert_close(logits_of(fast, fast_attention), expected, rtol=1e-4, atol=1e-4)


def test_joining_weights_leaves_the_module_as_it_was(make_model: ModelFactory) -> None:
    original = make_model("llama")
    module = copy.deepcopy(original)
    described = describe(module)
    make_forward(described, paged_attention(described))
    joined = dict(module.named_parameters())
    for name, parameter in original.named_parameters():
        assert torch.equal(parameter, joined[name])
    attention = module.model.layers[0].self_attn
    shared = attention.q_proj.weight.untyped_storage().data_ptr()
    assert attention.k_proj.weight.untyped_storage().data_ptr() == shared


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "mistral_window", "gemma2", "opt"])
def test_other_architectures_run_through_transformers(architecture: str, make_model: ModelFactory) -> None:
    described = describe(make_model(architecture))
    assert isinstance(make_forward(described, paged_attention(described)), TransformersForward)


def test_a_llama_with_more_to_it_is_not_plain(make_model: ModelFactory) -> None:
    plain = make_model("llama")
    assert is_plain(plain)
    assert not is_plain(copy.deepcopy(plain).to(torch.bfloat16))
    curved = copy.deepcopy(plain)
    curved.config.hidden_act = "gelu"
    assert not is_plain(curved)
    biased = copy.deepcopy(plain)
    biased.model.layers[0].mlp.up_proj.bias = torch.nn.Parameter(torch.zeros(48))
    assert not is_plain(biased)
