"""Embeddings on a whole stack: the model's own last hidden states, however they are asked for."""

import base64
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conformance.schemas import violations
from tests.stack.running import TINY_CHAT, RunningStack

pytestmark = pytest.mark.stack
TEXTS = ["A dog ran home.", "Rain.", "Once upon a time there was a fox. " * 12]


@pytest.fixture(scope="module")
def states() -> list[torch.Tensor]:
    """Of each text, `[tokens, width]`: from transformers, each text by itself."""
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY_CHAT)
    model: Any = AutoModelForCausalLM.from_pretrained(TINY_CHAT, dtype=torch.float32)
    model.eval()
    with torch.inference_mode():
        inputs = [torch.tensor([tokenizer(text).input_ids]) for text in TEXTS]
        return [model.model(input_ids=each).last_hidden_state[0] for each in inputs]


@pytest.fixture(scope="module")
def expected(states: list[torch.Tensor]) -> list[list[float]]:
    return [torch.nn.functional.normalize(each[-1], dim=-1).tolist() for each in states]


def vectors(reply: Any) -> list[list[float]]:
    return [each.embedding for each in sorted(reply.data, key=lambda each: each.index)]


def test_they_are_the_models_hidden_states(client: openai.OpenAI, expected: list[list[float]]) -> None:
    """The second time blocks of the longest are found in the prefix cache, or on another worker."""
    for _ in range(2):
        reply = client.embeddings.create(model="tiny_chat", input=TEXTS, encoding_format="float")
        np.testing.assert_allclose(vectors(reply), expected, atol=1e-4)
        assert reply.usage.prompt_tokens == reply.usage.total_tokens > 100
    single = client.embeddings.create(model="tiny_chat", input=TEXTS[0], encoding_format="float")
    np.testing.assert_allclose(vectors(single), expected[:1], atol=1e-4)


def test_base64_and_tokens(http: httpx.Client, client: openai.OpenAI, expected: list[list[float]]) -> None:
    np.testing.assert_allclose(
        vectors(client.embeddings.create(model="tiny_chat", input=TEXTS)), expected, atol=1e-4
    )  # the SDK asks for base64 by itself
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY_CHAT)
    tokens = [tokenizer(text).input_ids for text in TEXTS]
    body = {"model": "tiny_chat", "input": tokens, "encoding_format": "base64"}
    reply = http.post("/v1/embeddings", json=body).json()
    packed = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in reply["data"]]
    np.testing.assert_allclose(packed, expected, atol=1e-4)
    body["encoding_format"] = "float"
    reply = http.post("/v1/embeddings", json=body).json()
    assert violations("CreateEmbeddingResponse", reply) == []


def test_fewer_dimensions_are_of_length_one_again(client: openai.OpenAI, expected: list[list[float]]) -> None:
    reply = client.embeddings.create(model="tiny_chat", input=TEXTS, dimensions=16)
    cut = np.asarray(expected)[:, :16]
    np.testing.assert_allclose(vectors(reply), cut / np.linalg.norm(cut, axis=1, keepdims=True), atol=1e-3)


def test_a_text_is_cut_where_that_is_asked_for(client: openai.OpenAI) -> None:
    long = "word " * 20_000
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.embeddings.create(model="tiny_chat", input=long)
    cut = client.embeddings.create(model="tiny_chat", input=long, extra_body={"truncate_prompt_tokens": 30})
    assert cut.usage.prompt_tokens == 30


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 4096}, "dimensions"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [10**9]}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_refusals_name_the_field(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    reply = http.post("/v1/embeddings", json={"model": "tiny_chat", "input": "a", **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_the_mean_of_all_tokens(featured: RunningStack, states: list[torch.Tensor]) -> None:
    """Twice, the second time with what the prefix cache has; one token; cut."""
    means = [torch.nn.functional.normalize(each.mean(0), dim=-1).tolist() for each in states]
    with featured.openai_client() as client:
        for _ in range(2):
            reply = client.embeddings.create(model="tiny_chat", input=TEXTS, encoding_format="float")
            np.testing.assert_allclose(vectors(reply), means, atol=1e-4)
            assert reply.usage.prompt_tokens == sum(len(each) for each in states)
        one = client.embeddings.create(model="tiny_chat", input=[[300]], encoding_format="float")
        assert one.usage.prompt_tokens == 1 and np.linalg.norm(vectors(one)[0]) == pytest.approx(1, abs=1e-5)
