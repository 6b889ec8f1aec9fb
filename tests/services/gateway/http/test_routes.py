"""The HTTP surface as OpenAI's client and a raw one see it: routes, errors, schema, readiness."""

import asyncio
import logging
from typing import Any

import httpx
import pytest
from pytest import LogCaptureFixture

from services.gateway.counters import MOST_IGNORED_NAMES
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
    ("POST", "/v1/rerank", 501, "not_supported"),
    ("POST", "/v1/score", 501, "not_supported"),
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
        assert reply.status_code == 429 and reply.headers["retry-after"] == "3"
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
    assert reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1
    error_of(reply)


async def test_readiness_says_what_is_missing(make_stack: MakeStack) -> None:
    stack = await make_stack(scheduler_timeout_s=0.3, worker_timeout_s=0.3)
    assert (await stack.http.get("/ready")).json() == {"status": "ready"}
    for worker in stack.workers:
        worker.frozen = True
    await asyncio.sleep(0.6)
    reply = await stack.http.get("/ready")
    assert reply.status_code == 503 and error_of(reply)["message"] == f"not ready: no worker serves '{MODEL}'"
    assert (await stack.http.get("/health")).status_code == 200


async def test_what_a_client_sends_is_not_repeated_at_length(stack: Stack, caplog: LogCaptureFixture) -> None:
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
        assert reply.status_code == 404 and len(reply.content) < 2000
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
    assert reply.status_code == 503 and "no worker serves 'another'" in error_of(reply)["message"]
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
        assert stranger.status_code == 401 and (await stack.http.get(path)).status_code == 405


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASKED},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": ASKED, "max_tokens": 16},
}
OWN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"type": "function", "function": {"name": "run"}},
    "/v1/responses": {"type": "function", "name": "run"},
    "/v1/messages": {"name": "run", "input_schema": {"type": "object"}},
}
HOSTED = {"type": "web_search", "name": "web_search"}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [HOSTED]}
IGNORED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "/v1/chat/completions": [
        ({"new": 1, "prediction": {"type": "content", "content": "x"}}, "new, prediction"),
        ({"tools": [{"type": "custom"}, OWN["/v1/chat/completions"]]}, "tools.custom"),
        ({"stream": True, "stream_options": {"include_usge": True}}, "stream_options.include_usge"),
        ({"messages": [{**ASKED[0], "colour": "red"}, {**ASKED[0], "refusal": None}]}, "messages.colour"),
        ({"web_search_options": {"a": 1}, "user": "", "store": False}, "web_search_options"),
        ({"x\r\nset-cookie: y": 1, "é": 1}, "x%0D%0Aset-cookie%3A%20y, %C3%A9"),
    ],
    "/v1/responses": [
        ({"client_metadata": {"turn": "1"}, "include": ["reasoning"]}, "client_metadata, include"),
        ({"tools": [{**HOSTED, "external_web_access": False}, OWN["/v1/responses"]]}, "tools.web_search"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": 5}]}, "tools.namespace"),
        ({"tools": [HOSTED, OWN["/v1/responses"]], "tool_choice": ALLOWED}, "tools.web_search"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"input": [{**ASKED[0], "type": "message", "colour": 1}, *ASKED]}, "input.colour"),
    ],
    "/v1/messages": [
        ({"thread": {"type": "create"}, "betas": ["x"], "mcp_servers": [{}]}, "thread, betas, mcp_servers"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.web_search_20250305"),
        ({"tools": [{"name": "run", "input_schema": {}, "colour": 1}]}, "tools.colour"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
        ({"output_config": {"effrt": "low"}, "top_p": 0.5}, "output_config.effrt"),
    ],
}
CASES = [(path, *case) for path, cases in IGNORED.items() for case in cases]


async def ask(stack: Stack, path: str, fields: dict[str, Any]) -> httpx.Response:
    return await stack.http.post(path, json={"model": MODEL, **BODIES[path], **fields})


@pytest.fixture
async def strict(make_stack: MakeStack) -> Stack:
    return await make_stack(unknown_fields="refuse")


@pytest.mark.parametrize(("path", "fields", "names"), CASES)
async def test_it_is_named(stack: Stack, path: str, fields: dict[str, Any], names: str) -> None:
    reply = await ask(stack, path, fields)
    assert (reply.status_code, reply.headers["x-kvasir-ignored"]) == (200, names), reply.text
    assert "x-kvasir-ignored" not in (await ask(stack, path, {})).headers
    if path == "/v1/messages":
        body = {"model": MODEL, **BODIES[path], **fields}
        counted = await stack.http.post("/v1/messages/count_tokens", json=body)
        assert counted.json()["input_tokens"] and counted.headers["x-kvasir-ignored"] == names


@pytest.mark.parametrize("stream", [False, True])
async def test_a_repeated_request_names_what_the_first_one_ignored(stack: Stack, stream: bool) -> None:
    body = {"model": MODEL, "messages": ASKED, "stream": stream, "new": 1}
    headers = {"idempotency-key": f"key {stream}"}
    replies = [await stack.http.post("/v1/chat/completions", json=body, headers=headers) for _ in range(2)]
    assert [reply.headers.get("x-kvasir-ignored") for reply in replies] == ["new"] * 2
    assert replies[0].content == replies[1].content and len(stack.scheduler.submits) == 1


async def test_it_is_counted_by_name_and_names_are_bounded(stack: Stack) -> None:
    def labels(text: str) -> set[str]:
        return {line for line in text.splitlines() if line.startswith("kvasir_gateway_ignored_total{")}

    before = labels((await stack.operator.get("/metrics")).text)
    assert (await ask(stack, "/v1/messages", {"thread": 1})).status_code == 200
    for turn in range(4):
        fields = {f"field_{turn}_{at}": 1 for at in range(30)} | {"a\nb": 1}
        assert (await ask(stack, "/v1/responses", fields)).status_code == 200
    after = labels((await stack.operator.get("/metrics")).text)
    assert 'kvasir_gateway_ignored_total{name="thread"}' in str(after)
    assert 'kvasir_gateway_ignored_total{name="other"}' in str(after)
    assert len({line.split(" ")[0] for line in after - before}) <= MOST_IGNORED_NAMES + 1


@pytest.mark.parametrize("path", BODIES)
async def test_strictness_refuses_it_on_every_api(strict: Stack, path: str) -> None:
    for fields in ({"colour": 1}, {"tools": [HOSTED]}, {"tools": [OWN[path], HOSTED]}):
        reply = await ask(strict, path, fields)
        assert reply.status_code == 400 and ("colour" in reply.text or "web_search" in reply.text), reply.text
    known = {"metadata": {"user_id": "u"}, "service_tier": "auto"}
    assert (await ask(strict, path, known)).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"n": 1000}),
        ("/v1/chat/completions", {"audio": {"voice": "x"}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("/v1/chat/completions", {"stop_sequences": ["x"]}),
        ("/v1/responses", {"n": 2}),
        ("/v1/responses", {"modalities": ["audio"]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        ("/v1/responses", {"tools": [HOSTED], "tool_choice": "required"}),
        ("/v1/responses", {"max_tokens": 5}),
        ("/v1/responses", {"tools": [HOSTED], "tool_choice": {**ALLOWED, "mode": "required", "tools": 5}}),
        ("/v1/messages", {"n": 2}),
        ("/v1/messages", {"audio": {"voice": "x"}}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
        ("/v1/messages", {"tools": [HOSTED], "tool_choice": {"type": "any"}}),
        ("/v1/messages", {"response_format": {"type": "json_object"}}),
    ],
)
async def test_what_changes_the_answer_is_refused(stack: Stack, path: str, fields: dict[str, Any]) -> None:
    reply = await ask(stack, path, fields)
    assert reply.status_code == 400
    named = next(reversed(fields))
    assert named in reply.json()["error"]["message"] or named in (reply.json()["error"].get("param") or "")


@pytest.mark.parametrize("path", BODIES)
async def test_system_and_developer_stand_anywhere(stack: Stack, path: str) -> None:
    turns = [*ASKED, *({"role": role, "content": "Be brief."} for role in ("system", "developer")), *ASKED]
    name = "input" if path == "/v1/responses" else "messages"
    assert (await ask(stack, path, {name: turns})).status_code == 200
    reply = await ask(stack, path, {name: [*ASKED, {"role": "boss", "content": "x"}]})
    assert reply.status_code == 400 and f"{name}[1].role" in reply.text
