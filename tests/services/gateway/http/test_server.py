"""The two listeners: their addresses, and that one of them is never the clients'."""

import asyncio
import socket

import pytest

from services.gateway.http.connection import bind
from shared.errors import ConfigError
from tests.patience import PATIENCE_S
from tests.services.gateway.conftest import MakeStack


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
        requests = [
            asyncio.create_task(
                stack.openai.completions.create(model="fake-chat", prompt="hello", max_tokens=1)
            )
            for _ in range(4)
        ]
        async with asyncio.timeout(PATIENCE_S):
            while len(stack.scheduler.submits) < 4:
                await asyncio.sleep(0.01)
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
