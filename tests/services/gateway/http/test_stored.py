"""Responses that are stored or made in the background, through a real port and with a real file."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from shared.errors import InvalidRequest
from tests.patience import PATIENCE_S, until
from tests.services.gateway.conftest import ANSWER, MakeStack, Stack
from tests.services.gateway.fakes import MODEL, cancelled

BODY: dict[str, Any] = {"model": MODEL, "input": "hello", "temperature": 0}


@pytest_asyncio.fixture
async def keeping(make_stack: MakeStack, tmp_path: Path) -> Stack:
    """What nobody reads is given up soon; what is made in the background is not."""
    return await make_stack(stored_responses=str(tmp_path / "responses.db"), resume_s=0.2)


async def begun(stack: Stack, **fields: Any) -> str:
    """A response in the background that workers have been given."""
    reply = await stack.http.post("/v1/responses", json={**BODY, "background": True, **fields})
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert (body["status"], body["background"], body["output"]) == ("queued", True, [])
    await until(lambda: stack.scheduler.submits)
    return str(body["id"])


async def polled(stack: Stack, name: str) -> dict[str, Any]:
    reply = await stack.http.get(f"/v1/responses/{name}")
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


async def ended(stack: Stack, name: str) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE_S):
        while (body := await polled(stack, name))["status"] == "in_progress":
            await asyncio.sleep(0.01)
    return body


async def test_one_in_the_background_goes_on_though_nobody_reads_it(keeping: Stack) -> None:
    keeping.hold()
    name = await begun(keeping)
    await asyncio.sleep(0.5)  # longer than `resume_s`
    assert (await polled(keeping, name))["status"] == "in_progress"
    keeping.hold(is_held=False)
    body = await ended(keeping, name)
    assert (body["status"], body["background"]) == ("completed", True)
    assert body["output"][0]["content"][0]["text"] == ANSWER
    refused = await keeping.http.post(f"/v1/responses/{name}/cancel")
    assert refused.json() == body, "it has ended"


async def test_its_events_go_on_when_their_reader_leaves(keeping: Stack) -> None:
    keeping.hold()
    asked = {**BODY, "background": True, "stream": True}
    posted = asyncio.create_task(keeping.http.post("/v1/responses", json=asked))
    await until(lambda: keeping.scheduler.submits)
    posted.cancel()
    name = "resp_" + keeping.scheduler.submits[0].ref.request_id.removeprefix("req_")
    assert (await polled(keeping, name))["status"] == "in_progress"
    keeping.hold(is_held=False)
    assert (await ended(keeping, name))["status"] == "completed"


@pytest.mark.parametrize("verb", ["cancel", "delete"])
async def test_one_that_is_ended_is_computed_no_more(keeping: Stack, verb: str) -> None:
    keeping.hold()
    name = await begun(keeping)
    if verb == "cancel":
        for _ in range(2):
            reply = await keeping.http.post(f"/v1/responses/{name}/cancel")
            assert (reply.status_code, reply.json()["status"]) == (200, "cancelled")
    else:
        assert (await keeping.http.delete(f"/v1/responses/{name}")).json()["deleted"] is True
    await until(lambda: keeping.scheduler.cancelled)
    keeping.hold(is_held=False)
    await asyncio.sleep(0.2)
    reply = await keeping.http.get(f"/v1/responses/{name}")
    assert reply.status_code == (200 if verb == "cancel" else 404)
    assert verb == "delete" or reply.json()["status"] == "cancelled"


async def test_one_whose_gateway_is_gone_has_failed(
    keeping: Stack, make_stack: MakeStack, tmp_path: Path
) -> None:
    keeping.hold()
    name = await begun(keeping)
    await cancelled(keeping.running)
    other = await make_stack(stored_responses=str(tmp_path / "responses.db"), instance="gateway-1")
    body = await ended(other, name)
    assert body["status"] == "failed" and "ask for it again" in body["error"]["message"]
    assert await polled(other, name) == body


async def test_what_ends_it_is_kept(keeping: Stack) -> None:
    keeping.scheduler.refusal = InvalidRequest("too odd")
    body = await ended(keeping, await begun(keeping))
    assert (body["status"], body["error"]["message"]) == ("failed", "too odd")


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"background": True, "store": False}, "store"), ({"background": "yes"}, "background")],
)
async def test_what_cannot_be_in_the_background(keeping: Stack, fields: dict[str, Any], param: str) -> None:
    reply = await keeping.http.post("/v1/responses", json={**BODY, **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_what_cannot_be_cancelled(keeping: Stack, stack: Stack) -> None:
    name = (await keeping.http.post("/v1/responses", json=BODY)).json()["id"]
    reply = await keeping.http.post(f"/v1/responses/{name}/cancel")
    assert reply.status_code == 400 and "background: true" in reply.json()["error"]["message"]
    for asked in (keeping, stack):
        for path in ("resp_none/cancel", "resp_none/input_items"):
            method = "POST" if path.endswith("cancel") else "GET"
            assert (await asked.http.request(method, f"/v1/responses/{path}")).status_code == 404
    reply = await stack.http.post("/v1/responses", json={**BODY, "background": True})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "background")


async def test_input_items_are_the_conversation_before_the_answer(keeping: Stack) -> None:
    client = keeping.openai
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "42"}
    said = [{"role": "user", "content": "hello"}, call, result]
    first = await client.responses.create(model=MODEL, input=said, temperature=0)  # type: ignore[arg-type]
    then = await client.responses.create(
        model=MODEL, input="and?", temperature=0, previous_response_id=first.id, max_output_tokens=3
    )
    listed = await client.responses.input_items.list(first.id, order="asc")
    assert [item.type for item in listed.data] == ["message", "function_call", "function_call_output"]
    assert listed.data[0].content[0].text == "hello"  # type: ignore[union-attr,index]
    paged = [item async for item in client.responses.input_items.list(then.id, limit=2)]
    assert len({item.id for item in paged}) == len(paged) == 5
    assert paged[0].content[0].text == "and?"  # type: ignore[union-attr,index]
    assert paged[1].role == "assistant"  # type: ignore[union-attr]
    for query in ("limit=0", "limit=x", "order=up", "after=msg_none"):
        reply = await keeping.http.get(f"/v1/responses/{then.id}/input_items?{query}")
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, query.partition("=")[0])


async def test_an_operator_empties_the_prefix_caches(stack: Stack) -> None:
    reply = await stack.operator.post("/reset_prefix_cache")
    assert reply.json() == {"forgotten_blocks": {"worker-0": 7, "worker-1": 7}}
    page = await stack.operator.post("/reset_prefix_cache", headers={"origin": "http://evil.example"})
    assert page.status_code == 403
    assert (await stack.http.post("/reset_prefix_cache")).status_code == 404
    stack.workers[1].frozen = True
    reply = await stack.operator.post("/reset_prefix_cache")
    assert reply.status_code == 503 and "worker-1" in reply.json()["error"]["message"]
