"""The HTTP surface as OpenAI's client and a raw one see it: routes, errors, schema, readiness."""

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest

from services.gateway.openai.tokenize import MAX_DETOKENIZED_TOKENS
from shared.errors import InvalidRequest, NoResponder, Overloaded
from tests.conformance.schemas import violations
from tests.patience import until
from tests.services.gateway.conftest import ANSWER, MakeStack, Stack
from tests.services.gateway.fakes import MODEL, FakeScheduler

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def error_of(reply: httpx.Response) -> dict[str, Any]:
    """The error object, which has the same four fields whatever went wrong."""
    body = reply.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert all(isinstance(error[name], str) for name in ("message", "type"))
    assert all(error[name] is None or isinstance(error[name], str) for name in ("param", "code"))
    assert violations("ErrorResponse", body) == []
    return error


async def test_replies_conform_to_openais_schema(stack: Stack) -> None:
    chat = await stack.chat(n=2)
    assert violations("CreateChatCompletionResponse", chat.json()) == []
    streamed = await stack.chat(stream=True, n=2, stream_options={"include_usage": True})
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert len(chunks) > 5
    for chunk in chunks:
        assert violations("CreateChatCompletionStreamResponse", chunk) == []
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 5}
    text = await stack.http.post(TEXT, json=body)
    assert violations("CreateCompletionResponse", text.json()) == []
    models = (await stack.http.get("/v1/models")).json()
    assert violations("ListModelsResponse", models) == []
    model = (await stack.http.get(f"/v1/models/{MODEL}")).json()
    assert violations("Model", model) == []
    assert models["data"] == [model]
    assert model["max_model_len"] == 512


BAD_BODIES: list[tuple[bytes, int, str | None]] = [
    (b"{", 400, None),
    (b'{"model": "caf\xe9"}', 400, None),
    (b"[1, 2]", 400, None),
    (b"", 400, None),
    (b"{}", 400, "model"),
    (b'{"model": "nope", "messages": [{"role": "user", "content": "x"}]}', 404, "model"),
    (b'{"model": "fake-chat", "messages": []}', 400, "messages"),
    (b'{"model": "fake-chat", "messages": [{"role": "user", "content": 5}]}', 400, "messages[0].content"),
    (b'{"model": "fake-chat", "messages": [{"role": "user", "content": "x"}], "n": 17}', 400, "n"),
    (b'{"model": "fake-chat", "messages": [{"role": "user", "content": "x"}], "top_p": 2}', 400, "top_p"),
    (b"[" * 100_000, 400, None),
]

OTHER_ADDRESSES = [
    ("GET", "/nothing", 404, "unknown_url"),
    ("GET", "/v1/models/", 404, "model_not_found"),
    ("GET", "/redoc", 404, "unknown_url"),
    ("GET", CHAT, 405, "method_not_allowed"),
    ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ("GET", "/v1/models/other/model", 404, "model_not_found"),
]


async def test_bad_bodies(stack: Stack) -> None:
    for body, status, param in BAD_BODIES:
        reply = await stack.http.post(CHAT, content=body)
        assert reply.status_code == status, body[:100]
        error = error_of(reply)
        assert error["param"] == param, body[:100]
        assert error["type"] == "invalid_request_error"
    assert stack.scheduler.submits == []


async def test_other_addresses(stack: Stack) -> None:
    for method, path, status, code in OTHER_ADDRESSES:
        reply = await stack.http.request(method, path)
        assert reply.status_code == status, path
        assert error_of(reply)["code"] == code, path
    assert (await stack.http.get(CHAT)).headers["allow"] == "POST"


async def test_overload_is_said_before_any_header(stack: Stack) -> None:
    stack.scheduler.refusal = Overloaded("the queue is full", retry_after_s=2.5)
    for stream in (False, True):
        reply = await stack.chat(stream=stream)
        assert reply.status_code == 429
        assert reply.headers["retry-after"] == "3"
        assert error_of(reply)["code"] == "overloaded"
    stack.scheduler.refusal = InvalidRequest("too long for any worker", param="messages")
    assert (await stack.chat()).status_code == 400


async def test_one_refused_choice_cancels_the_others(stack: Stack) -> None:
    submit = stack.scheduler.submit

    async def refuse_third(command: Any) -> Any:
        if command.spec.ref.choice == 2:
            raise Overloaded("full")
        return await submit(command)

    stack.scheduler.submit = refuse_third  # type: ignore[method-assign]
    await stack.scheduler.bus.detach(FakeScheduler.HANDLERS[:1])
    await stack.scheduler.bus.attach(FakeScheduler.HANDLERS[:1], stack.scheduler)
    reply = await stack.chat(n=3, ignore_eos=True)
    assert reply.status_code == 429
    await until(lambda: len({ref.choice for ref in stack.scheduler.cancelled}) == 2)


async def test_no_scheduler_in_time_is_503(make_stack: MakeStack) -> None:
    stack = await make_stack(admit_timeout_s=0.5)
    await stack.scheduler.bus.detach(FakeScheduler.HANDLERS[:1])
    reply = await stack.chat()
    assert reply.status_code == 503
    assert int(reply.headers["retry-after"]) >= 1
    error_of(reply)


async def test_readiness_says_what_is_missing(make_stack: MakeStack) -> None:
    stack = await make_stack(scheduler_timeout_s=0.3, worker_timeout_s=0.3)
    assert (await stack.http.get("/ready")).json() == {"status": "ready"}
    for worker in stack.workers:
        worker.frozen = True
    await asyncio.sleep(0.6)
    reply = await stack.http.get("/ready")
    assert reply.status_code == 503
    assert error_of(reply)["message"] == f"not ready: no worker serves '{MODEL}'"
    assert (await stack.http.get("/health")).status_code == 200


async def test_a_body_over_the_cap_is_413(make_stack: MakeStack) -> None:
    stack = await make_stack(max_body_bytes=10_000)
    reply = await stack.chat(user="x" * 1_000_000)
    assert reply.status_code == 413
    assert error_of(reply)["code"] == "request_too_large"
    assert (await stack.chat(user="x" * 1_000)).status_code == 200


async def test_what_a_client_sends_is_not_repeated_at_length(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    """A model's name of four megabytes used to come back whole, and to be logged."""
    name = "A" * 1_000_000
    with caplog.at_level(logging.INFO, logger="kvasir"):
        replies = [
            await stack.chat(model=name),
            await stack.http.post("/tokenize", json={"model": name, "prompt": "x"}),
            await stack.http.get("/v1/models/" + name[:10_000]),
            await stack.http.get("/" + name[:10_000]),
        ]
    for reply in replies:
        assert reply.status_code == 404
        assert len(reply.content) < 2000
        assert "characters)" in error_of(reply)["message"]
    assert f"there is '{MODEL}'" in error_of(replies[0])["message"]
    lines = [str(record.__dict__["fields"]) for record in caplog.records if record.message == "request"]
    assert len(lines) == 4 and all(len(line) < 4000 for line in lines)


async def test_fields_and_messages_are_counted_before_they_are_looked_at(make_stack: MakeStack) -> None:
    """Without text they cost nothing but their rendering: 100,000 of them stopped all streams for seconds."""
    stack = await make_stack(max_messages=10)
    reply = await stack.chat(**{f"field_{number}": 0 for number in range(2000)})
    assert reply.status_code == 400 and "send at most 1024" in error_of(reply)["message"]
    empty = {"role": "user", "content": ""}
    in_parts = {"role": "user", "content": [{"type": "text", "text": ""}] * 10}
    for path in (CHAT, "/tokenize"):
        for messages in ([empty] * 11, [in_parts], [None] * 11):
            reply = await stack.http.post(path, json={**stack.body, "messages": messages})
            assert (reply.status_code, error_of(reply)["param"]) == (400, "messages")
            said = "11 messages and content parts; send at most 10 in one request"
            assert error_of(reply)["message"] == said
        assert (await stack.http.post(path, json={**stack.body, "messages": [empty] * 10})).status_code == 200


async def test_no_worker_ever_is_503(make_stack: MakeStack) -> None:
    stack = await make_stack(wait_ready=False, served_name="another", admit_timeout_s=0.3)
    reply = await stack.http.post(CHAT, json={**stack.body, "model": "another"})
    assert reply.status_code == 503
    assert "no worker serves 'another'" in error_of(reply)["message"]
    assert NoResponder.code == error_of(reply)["code"]
    wrong = await asyncio.wait_for(stack.http.post(CHAT, json={**stack.body, "model": "third"}), 0.2)
    assert wrong.status_code == 404, "what is wrong anyway does not wait for a worker"


async def test_metrics_count(stack: Stack) -> None:
    await stack.chat()
    await stack.chat(some_new_field=1)
    await stack.http.post("/tokenize", json={"prompt": "x"})
    assert (await stack.http.get("/metrics")).status_code == 404, "they are the operator's, not the clients'"
    text = (await stack.operator.get("/metrics")).text
    assert 'kvasir_gateway_requests_total{route="/v1/chat/completions",status="200"}' in text
    assert 'kvasir_gateway_requests_total{route="/tokenize",status="200"}' in text
    assert 'kvasir_gateway_ignored_total{name="some_new_field"}' in text
    assert (await stack.http.get("/version")).json()["version"]


ASKED = [{"role": "user", "content": "hello"}]


async def test_a_text_there_and_back(stack: Stack) -> None:
    reply = (await stack.http.post("/tokenize", json={"model": MODEL, "prompt": ANSWER})).json()
    tokens = stack.codec.encode_text(ANSWER)
    assert reply == {"count": len(tokens), "max_model_len": 512, "tokens": tokens, "token_strs": None}
    back = await stack.http.post("/detokenize", json={"model": MODEL, "tokens": tokens})
    assert back.json() == {"prompt": "<|bos|>" + ANSWER}
    assert (await stack.http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_a_chat_is_what_completions_compute(stack: Stack) -> None:
    reply = (await stack.http.post("/tokenize", json={"messages": ASKED})).json()
    whole = (await stack.chat(max_tokens=1)).json()
    assert reply["count"] == whole["usage"]["prompt_tokens"]
    fields = {"messages": ASKED, "add_generation_prompt": False, "return_token_strs": True}
    shorter = (await stack.http.post("/tokenize", json=fields)).json()
    assert reply["tokens"][: shorter["count"]] == shorter["tokens"] != reply["tokens"]
    assert "".join(shorter["token_strs"]) == "<|bos|><|user|>hello<|end|>\n"


BAD: list[tuple[str, dict[str, Any], int, str]] = [
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": 5}, 400, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": ASKED}, 400, "prompt"),
    ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
    ("/tokenize", {"messages": []}, 400, "messages"),
    ("/tokenize", {"messages": ASKED, "tools": [{}]}, 400, "tools[0].function"),
    ("/tokenize", {"messages": ASKED, "add_special_tokens": True}, 400, "add_special_tokens"),
    ("/tokenize", {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].tool_call_id"),
    ("/detokenize", {}, 400, "tokens"),
    ("/detokenize", {"tokens": "x"}, 400, "tokens"),
    ("/detokenize", {"tokens": [1, -1]}, 400, "tokens[1]"),
    ("/detokenize", {"tokens": [1, 99999]}, 400, "tokens"),
    ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ("/detokenize", {"tokens": [1] * (MAX_DETOKENIZED_TOKENS + 1)}, 400, "tokens"),
]


async def test_refusals(stack: Stack) -> None:
    for path, body, status, param in BAD:
        reply = await stack.http.post(path, json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), (path, body)


async def test_keys_and_sizes_are_as_everywhere(make_stack: MakeStack) -> None:
    stack = await make_stack(max_body_bytes=1000)
    for path, body in (("/tokenize", {"prompt": "x" * 2000}), ("/detokenize", {"tokens": [5] * 1000})):
        assert (await stack.http.post(path, json=body)).status_code == 413
        stranger = await stack.http.post(path, json=body, headers={"authorization": "Bearer no"})
        assert stranger.status_code == 401
        assert (await stack.http.get(path)).status_code == 405
