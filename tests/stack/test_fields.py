"""Fields of vLLM's and OpenAI's on a whole stack: honoured, as the model itself says, or refused by name."""

import json
from functools import cache
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.stack.running import TINY_CHAT

pytestmark = pytest.mark.stack
TEXT = "The old house stood silent beside the road."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY_CHAT / "tokenizer.json"))


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {
        "model": "tiny_chat",
        "prompt": TEXT,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }
    reply = http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def text_of(reply: dict[str, Any]) -> str:
    return str(reply["choices"][0]["text"])


@cache
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(str(TINY_CHAT), dtype=torch.float32)


def true_logprobs(tokens: list[int]) -> list[float]:
    """Of each token but the first, by the model as transformers computes it."""
    with torch.inference_mode():
        logits = reference()(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return [logits[at, token].item() for at, token in enumerate(tokens[1:])]


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_prompts_are_scored_as_the_model_scores_them(
    http: httpx.Client, tokenizer: Tokenizer, max_tokens: int
) -> None:
    """What lm-eval asks for."""
    reply = complete(http, echo=True, logprobs=1, max_tokens=max_tokens)
    prompt = tokenizer.encode(TEXT).ids
    choice, logprobs = reply["choices"][0], reply["choices"][0]["logprobs"]
    assert choice["text"].startswith(TEXT) and choice["finish_reason"] == "length"
    assert reply["usage"]["prompt_tokens"] == len(prompt)
    assert reply["usage"]["completion_tokens"] == max_tokens
    assert len(logprobs["tokens"]) == len(prompt) + max_tokens
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    torch.testing.assert_close(
        torch.tensor(logprobs["token_logprobs"][1 : len(prompt)]),
        torch.tensor(true_logprobs(prompt)),
        atol=2e-3,
        rtol=1e-3,
    )
    for token, offset in list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))[1 : len(prompt)]:
        assert choice["text"][offset:].startswith(token)
    plain = complete(http, max_tokens=5)
    assert max_tokens == 0 or choice["text"] == TEXT + text_of(plain), "what follows is as without"


def test_echo_alone_and_streamed(http: httpx.Client) -> None:
    plain = text_of(complete(http))
    assert text_of(complete(http, echo=True)) == TEXT + plain
    body = {
        "model": "tiny_chat",
        "prompt": TEXT,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "echo": True,
        "stream": True,
    }
    lines = http.post("/v1/completions", json=body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == TEXT + plain
    assert text_of(complete(http, max_tokens=0)) == ""
    assert text_of(complete(http, max_tokens=0, echo=True)) == TEXT


def test_prompt_logprobs(http: httpx.Client, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(TEXT).ids
    reply = complete(http, prompt_logprobs=2, max_tokens=2)
    found = reply["choices"][0]["prompt_logprobs"]
    assert len(found) == len(prompt) and found[0] is None
    for token, entries, true in zip(prompt[1:], found[1:], true_logprobs(prompt), strict=True):
        assert abs(entries[str(token)]["logprob"] - true) < 5e-3
        assert 2 <= len(entries) <= 3
    assert reply["choices"][0]["logprobs"] is None


def test_which_tokens_are_chosen(http: httpx.Client, tokenizer: Tokenizer) -> None:
    wanted = tokenizer.token_to_id("dog")
    if wanted is None:
        wanted = tokenizer.encode(" dog", add_special_tokens=False).ids[0]
    written = tokenizer.decode([wanted])
    assert text_of(complete(http, logit_bias={str(wanted): 100}, max_tokens=3)) == written * 3
    assert text_of(complete(http, allowed_token_ids=[wanted], max_tokens=2)) == written * 2
    plain = text_of(complete(http, max_tokens=30))
    word = plain.split()[1]
    assert word in plain and word not in text_of(complete(http, max_tokens=30, bad_words=[word])).split()


def test_how_the_text_is_shown(http: httpx.Client) -> None:
    plain = text_of(complete(http, max_tokens=30))
    stop = plain.split()[3]
    cut = text_of(complete(http, max_tokens=30, stop=[stop]))
    assert text_of(complete(http, max_tokens=30, stop=[stop], include_stop_str_in_output=True)) == cut + stop
    special = complete(http, skip_special_tokens=False, logit_bias={"4": 100}, max_tokens=1)
    assert text_of(special) == "<|user|>"


def test_prompts_are_cut_and_answers_named(http: httpx.Client, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(TEXT).ids
    cut = complete(http, truncate_prompt_tokens=4)
    assert cut["usage"]["prompt_tokens"] == 4
    assert text_of(cut) == text_of(complete(http, prompt=prompt[-4:]))
    assert complete(http, prompt=[5] * 9000, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] > 100
    assert complete(http, request_id="mine-7")["id"] == "cmpl-mine-7"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"grammar": "x"}, "grammar"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"allowed_token_ids": [999999]}, "allowed_token_ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"prompt": [5], "max_tokens": 0}, "max_tokens"),
        ({"guided_regex": "a", "allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_refused_by_name(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    reply = http.post("/v1/completions", json={"model": "tiny_chat", "prompt": TEXT, **fields})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param
