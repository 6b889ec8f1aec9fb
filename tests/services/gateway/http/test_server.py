"""The two listeners; CORS, HEAD, probes of load balancers, and the description of the API."""

import asyncio
import socket

import pytest
from jsonschema import Draft202012Validator

from services.gateway.http.browser import GETS, POSTS
from services.gateway.http.connection import bind
from shared.errors import ConfigError
from tests.patience import until
from tests.services.gateway.conftest import MakeStack, Stack
from tests.services.gateway.fakes import MODEL


def test_a_port_in_use_is_a_configuration_error_that_names_the_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"cannot listen on .* set another operator_port") as caught:
            bind("127.0.0.1", taken.getsockname()[1], "operator_port")
    assert caught.value.param == "operator_port"


async def test_clients_who_take_every_connection_do_not_shut_the_operator_out(make_stack: MakeStack) -> None:
    """Health and metrics are asked for when something is wrong, and then the clients' listener is full."""
    stack = await make_stack(max_connections=4, receive_timeout_s=30.0)
    stack.hold()
    await stack.http.aclose()
    async with stack.openai:
        ask = stack.openai.completions.create
        requests = [asyncio.create_task(ask(model=MODEL, prompt="hello", max_tokens=1)) for _ in range(4)]
        await until(lambda: len(stack.scheduler.submits) == 4)
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
        assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
        writer.close()
        await writer.wait_closed()
        assert (await stack.operator.get("/health")).json() == {"status": "ok"}
        assert (await stack.operator.get("/ready")).json() == {"status": "ready"}
        assert b"kvasir_gateway_active_sequences" in (await stack.operator.get("/metrics")).content
        stack.hold(is_held=False)
        await asyncio.gather(*requests)


async def test_the_operators_listener_serves_nothing_else(make_stack: MakeStack) -> None:
    stack = await make_stack()
    assert (await stack.operator.get("/v1/models")).status_code == 401
    reply = await stack.operator.get("/v1/models", headers=stack.http.headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "unknown_url")


PAGE = "https://app.example"


async def test_pages_of_known_origins_may_call(make_stack: MakeStack) -> None:
    stack = await make_stack(cors_origins=(PAGE,))
    asks = {"origin": PAGE, "access-control-request-method": "POST"}
    asks["access-control-request-headers"] = "authorization,content-type"
    preflight = await stack.http.options("/v1/chat/completions", headers={**asks, "authorization": ""})
    assert preflight.status_code == 200, "a preflight carries no key"
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    body = {**stack.body, "stream": True, "max_tokens": 4}
    for origin, expected in ((PAGE, PAGE), ("https://evil.example", None), (None, None)):
        headers = {} if origin is None else {"origin": origin}
        reply = await stack.http.post("/v1/chat/completions", json=body, headers=headers)
        assert reply.status_code == 200
        assert reply.headers.get("access-control-allow-origin") == expected
    refused = await stack.http.get("/v1/models", headers={"origin": PAGE, "authorization": "Bearer no"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == PAGE


@pytest.mark.parametrize(
    "path", ["/health", "/ping", "/ready", "/v1/models", "/openapi.json", "/docs", "/version"]
)
async def test_head_is_get_without_a_body(stack: Stack, path: str) -> None:
    got, head = await stack.http.get(path), await stack.http.head(path)
    assert (head.status_code, head.content) == (got.status_code, b"") == (200, b"")
    assert head.headers["content-length"] == got.headers["content-length"]


async def test_the_description_describes(stack: Stack) -> None:
    described = (await stack.http.get("/openapi.json")).json()
    assert set(described["paths"]) == {*POSTS, *GETS, "/v1/responses/{name}/cancel"}
    for path, operations in described["paths"].items():
        for method in operations:
            reply = await stack.http.request(method, path.replace("{model}", MODEL), json={})
            is_there = reply.status_code not in (404, 405) or "no response" in reply.text
            assert is_there, path
    for name, schema in described["components"]["schemas"].items():
        Draft202012Validator.check_schema(schema), name
    chat = {**described["components"]["schemas"]["ChatRequest"], "components": described["components"]}
    validator = Draft202012Validator(chat)
    assert validator.is_valid({"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stop": "a"})
    assert not validator.is_valid({"model": MODEL, "messages": [{"role": "bot", "content": "x"}]})
    page = (await stack.http.get("/docs")).text
    assert "/v1/chat/completions" in page and "logit_bias" in page
