"""What a gateway does not know has no effect and is named, or is refused, on all three APIs alike."""

from typing import Any

import httpx
import pytest

from services.gateway.counters import MOST_IGNORED_NAMES
from tests.services.gateway.conftest import MakeStack, Stack
from tests.services.gateway.fakes import MODEL

ASKED = [{"role": "user", "content": "hello"}]
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
async def test_what_would_change_the_answer_is_refused(
    stack: Stack, path: str, fields: dict[str, Any]
) -> None:
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
