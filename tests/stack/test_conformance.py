"""Every answer and event held against OpenAI's own description; stored responses; fields of vLLM's and
OpenAI's, honoured or refused by name; forms drawn to end a process.
"""

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import openai
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.conformance.schemas import closed, violations
from tests.fuzz.schemas import request_of
from tests.patience import STACK_PATIENCE_S
from tests.stack.running import TINY_CHAT, RunningStack

pytestmark = pytest.mark.stack
ASK = [{"role": "user", "content": "Tell me a short story about a dog."}]
CITY = closed(city={"type": "string", "maxLength": 20})
TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}}
FORM = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": CITY}}
CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several": {"n": 3, "seed": 4},
    "logprobs": {"logprobs": True, "top_logprobs": 4},
    "form": {"response_format": FORM, "max_tokens": 60},
    "any object": {"response_format": {"type": "json_object"}, "max_tokens": 60},
    "called": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 80},
    "named": {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "parallel_tool_calls": False,
        "max_tokens": 80,
    },
    "may call": {"tools": [TOOL]},
    "after a call": {
        "tools": [TOOL],
        "messages": [
            *ASK,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        ],
    },
    "stopped": {"stop": ["a", "e"]},
    "nothing": {"max_tokens": 0},
}
TEXTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several": {"prompt": ["Once", "Twice"], "n": 2},
    "logprobs": {"logprobs": 3},
    "echo": {"echo": True, "logprobs": 2, "max_tokens": 0},
    "form": {"guided_choice": ["yes", "no"]},
    "tokens": {"prompt": [5, 6, 7]},
}
UNFINISHED = re.compile(r"choices/\d+/finish_reason: None is not ")
"""In pieces before the last the reason is null, as in OpenAI's own streams; it describes whole ones only."""
RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "instructed": {"instructions": "Be brief.", "temperature": 0.5},
    "form": {"text": {"format": {"type": "json_schema", "name": "city", "strict": True, "schema": CITY}}},
    "called": {
        "tools": [{"type": "function", "name": "weather", "parameters": CITY, "strict": True}],
        "tool_choice": "required",
    },
}


def whole(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = http.post(path, json={"model": "tiny_chat", **body})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of each event but `[DONE]`."""
    reply = http.post(path, json={"model": "tiny_chat", "stream": True, **body})
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("name", CHATS)
def test_chats(http: httpx.Client, name: str) -> None:
    body = {"messages": ASK, "max_tokens": 12, **CHATS[name]}
    assert violations("CreateChatCompletionResponse", whole(http, "/v1/chat/completions", body)) == []
    streamed = events(http, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    assert streamed[-1]["usage"]["total_tokens"] > 0
    for chunk in streamed:
        assert violations("CreateChatCompletionStreamResponse", chunk) == [], chunk


@pytest.mark.parametrize("name", TEXTS)
def test_completions(http: httpx.Client, name: str) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 8, **TEXTS[name]}
    reply = whole(http, "/v1/completions", body)
    if name == "echo":  # nothing precedes the first token: null, as OpenAI has it, though it does not say so
        logprobs = reply["choices"][0]["logprobs"]
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        logprobs["token_logprobs"][0], logprobs["top_logprobs"][0] = 0.0, {}
    assert violations("CreateCompletionResponse", reply) == []
    for chunk in events(http, "/v1/completions", body):
        found = violations("CreateCompletionResponse", chunk)
        if name == "echo" and chunk["choices"][0]["logprobs"]:
            continue
        assert [line for line in found if not UNFINISHED.match(line)] == [], chunk


@pytest.mark.parametrize("name", RESPONSES)
def test_responses(http: httpx.Client, name: str) -> None:
    body = {"input": "Tell me a short story.", "max_output_tokens": 80, **RESPONSES[name]}
    assert violations("Response", whole(http, "/v1/responses", body)) == []
    streamed = events(http, "/v1/responses", body)
    assert streamed[-1]["type"] in ("response.completed", "response.incomplete")
    assert [event["sequence_number"] for event in streamed] == list(range(len(streamed)))
    for event in streamed:
        assert violations("ResponseStreamEvent", event) == [], event


def test_models_and_refusals(http: httpx.Client) -> None:
    assert violations("ListModelsResponse", http.get("/v1/models").json()) == []
    assert violations("Model", http.get("/v1/models/tiny_chat").json()) == []
    refused = [
        http.get("/v1/models/none"),
        http.get("/v1/nothing"),
        http.get("/v1/chat/completions"),
        *(http.post(path, json={"model": "none"}) for path in ("/v1/embeddings", "/v1/responses")),
        http.post("/v1/completions", content=b"\xff"),
        http.post("/v1/chat/completions", json={"model": "tiny_chat", "messages": ASK, "n": 1000}),
    ]
    for reply in refused:
        assert 400 <= reply.status_code < 500 and violations("ErrorResponse", reply.json()) == [], reply.text


FIRST, THEN = "Tell me a short story about a dog.", "Thank you! What was it about?"


@pytest.fixture
def keeper(featured: RunningStack) -> Iterator[openai.OpenAI]:
    with featured.openai_client() as made:
        yield made


def test_one_is_found_again_and_deleted(keeper: openai.OpenAI) -> None:
    reply = keeper.responses.create(model="tiny_chat", input=FIRST, max_output_tokens=20, temperature=0)
    again = keeper.responses.retrieve(reply.id)
    assert again == reply and again.output_text and again.store is True  # type: ignore[attr-defined]
    with keeper.responses.stream(model="tiny_chat", input=FIRST, max_output_tokens=400) as stream:
        streamed = stream.get_final_response()
    assert keeper.responses.retrieve(streamed.id).output_text == streamed.output_text
    keeper.responses.delete(reply.id)
    for ask in (keeper.responses.retrieve, keeper.responses.delete):
        with pytest.raises(openai.NotFoundError, match="no response"):
            ask(reply.id)
    unstored = keeper.responses.create(model="tiny_chat", input=FIRST, max_output_tokens=4, store=False)
    with pytest.raises(openai.NotFoundError):
        keeper.responses.retrieve(unstored.id)


def test_a_conversation_goes_on(keeper: openai.OpenAI) -> None:
    """As it would with all of it sent; also when the first is gone, and from one of both more than once."""
    asked: dict[str, Any] = {"model": "tiny_chat", "max_output_tokens": 30, "temperature": 0}
    first = keeper.responses.create(input=FIRST, **asked)
    turns = [("user", FIRST), ("assistant", first.output_text), ("user", THEN)]
    spoken: Any = [{"role": role, "content": text} for role, text in turns]
    sent = keeper.responses.create(input=spoken, **asked)
    asked |= {"input": THEN, "previous_response_id": first.id}
    replies = [keeper.responses.create(**asked) for _ in range(2)]
    assert {reply.output_text for reply in replies} == {sent.output_text}
    assert replies[0].previous_response_id == first.id
    assert replies[0].usage and sent.usage and replies[0].usage.input_tokens == sent.usage.input_tokens
    keeper.responses.delete(first.id)
    third = keeper.responses.create(
        model="tiny_chat", input="Bye.", previous_response_id=replies[0].id, max_output_tokens=4
    )
    assert third.usage and third.usage.input_tokens > sent.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="no response"):
        keeper.responses.create(model="tiny_chat", input=THEN, previous_response_id=first.id)


def test_where_nothing_is_stored_that_is_said(roomy: RunningStack) -> None:
    body = {"model": "tiny_chat", "input": FIRST, "max_output_tokens": 4}
    headers = {"Authorization": f"Bearer {roomy.key}"}
    with httpx.Client(base_url=roomy.url, headers=headers, timeout=STACK_PATIENCE_S) as http:
        assert http.post("/v1/responses", json=body).json()["store"] is False
        for field in ({"store": True}, {"previous_response_id": "resp_1"}):
            error = http.post("/v1/responses", json={**body, **field}).json()["error"]
            assert error["param"] in field and "gateway.stored_responses" in error["message"]
        for method in ("GET", "DELETE"):
            reply = http.request(method, "/v1/responses/resp_1")
            assert reply.status_code == 404 and "gateway.stored_responses" in reply.text


SENTENCE = "The old house stood silent beside the road."
PLAIN = {"model": "tiny_chat", "prompt": SENTENCE, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY_CHAT / "tokenizer.json"))


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    reply = http.post("/v1/completions", json={**PLAIN, **fields})
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
def test_prompts_are_scored_as_by_the_model(
    http: httpx.Client, tokenizer: Tokenizer, max_tokens: int
) -> None:
    """What lm-eval asks for."""
    reply = complete(http, echo=True, logprobs=1, max_tokens=max_tokens)
    prompt = tokenizer.encode(SENTENCE).ids
    choice, logprobs = reply["choices"][0], reply["choices"][0]["logprobs"]
    assert choice["text"].startswith(SENTENCE) and choice["finish_reason"] == "length"
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
    assert max_tokens == 0 or choice["text"] == SENTENCE + text_of(plain), "what follows is as without"


def test_echo_alone_and_streamed(http: httpx.Client) -> None:
    plain = text_of(complete(http))
    assert text_of(complete(http, echo=True)) == SENTENCE + plain
    lines = http.post("/v1/completions", json={**PLAIN, "echo": True, "stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == SENTENCE + plain
    assert text_of(complete(http, max_tokens=0)) == ""
    assert text_of(complete(http, max_tokens=0, echo=True)) == SENTENCE


def test_prompt_logprobs(http: httpx.Client, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(SENTENCE).ids
    reply = complete(http, prompt_logprobs=2, max_tokens=2)
    found = reply["choices"][0]["prompt_logprobs"]
    assert len(found) == len(prompt) and found[0] is None
    for token, entries, true in zip(prompt[1:], found[1:], true_logprobs(prompt), strict=True):
        assert abs(entries[str(token)]["logprob"] - true) < 5e-3 and 2 <= len(entries) <= 3
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
    prompt = tokenizer.encode(SENTENCE).ids
    cut = complete(http, truncate_prompt_tokens=4)
    assert cut["usage"]["prompt_tokens"] == 4 and text_of(cut) == text_of(complete(http, prompt=prompt[-4:]))
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
    reply = http.post("/v1/completions", json={"model": "tiny_chat", "prompt": SENTENCE, **fields})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param


AT_ONCE = 6
MOST_S, MOST_AGAIN = 3.0, 20
"""Of one request; those that took longer are asked again alone, as other things may have had the machine."""


async def ask(client: httpx.AsyncClient, seed: int, model: str) -> tuple[int, float, str]:
    path, body = request_of(seed, model)
    began_s = time.monotonic()
    reply = await client.post(path, content=body)
    return reply.status_code, time.monotonic() - began_s, reply.text


async def all_of(stack: RunningStack, seeds: range) -> None:
    before = [stack.child(name)["pid"] for name in ("gateway-0", "worker-0", "worker-1")]
    left, found, slow = iter(seeds), Counter[int](), list[int]()
    headers = {"Authorization": f"Bearer {stack.key}", "Content-Type": "application/json"}
    async with httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=STACK_PATIENCE_S) as client:

        async def some() -> None:
            for seed in left:
                status, took_s, text = await ask(client, seed, stack.model.name)
                assert status in (200, 400), f"seed {seed}: {status} {text}"
                found[status] += 1
                if took_s > MOST_S:
                    slow.append(seed)

        await asyncio.gather(*(some() for _ in range(AT_ONCE)))
        alone = [(seed, await ask(client, seed, stack.model.name)) for seed in slow[:MOST_AGAIN]]
    print(dict(found), "slow:", slow)
    assert found.total() == len(seeds) and min(found[200], found[400]) > len(seeds) // 10
    assert [(seed, took_s) for seed, (_, took_s, _) in alone if took_s > MOST_S] == []
    assert [stack.child(n)["pid"] for n in ("gateway-0", "worker-0", "worker-1")] == before, stack.logs()


async def test_some_forms_end_no_process(stack: RunningStack) -> None:
    await all_of(stack, range(150))


@pytest.mark.slow
async def test_twenty_thousand_forms_end_no_process(stack: RunningStack) -> None:
    await all_of(stack, range(20_000))
