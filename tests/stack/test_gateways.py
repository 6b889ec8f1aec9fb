"""Two gateways at one port: one is killed, and every client that asks again gets its answer, once, the same.

A request that bears an `Idempotency-Key` is gone on with by the other gateway; whoever asks with that key, at
whichever gateway, is told all of it from the beginning. A streamed response goes on after the event that the
client had last.
"""

import asyncio
import json
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.patience import STACK_PATIENCE_S
from tests.stack.running import RunningStack, running_stack

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    run = tmp_path_factory.mktemp("pair") / "run"
    with running_stack(run, flags=("--gateways", "2"), settings=("worker.kv_blocks=4096",)) as stack:
        yield stack


SEEDED = 4


@dataclass
class Heard:
    """What a client was told, by each time it asked."""

    events: list[dict[str, Any]] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    """Texts of which the end was missing."""
    is_done: bool = False

    @property
    def text(self) -> str:
        return "".join(event["choices"][0]["text"] for event in self.events if event.get("choices"))


def body_of(number: int, tokens: int) -> dict[str, Any]:
    """Most without a seed: nobody could give the same answer by asking again. Every `SEEDED`th has one."""
    seeded = {"seed": number} if number % SEEDED == 0 else {}
    return {
        **seeded,
        "model": "tiny_chat",
        "prompt": f"Once upon a time, {number} days ago, there was a fox" + " and a dog" * (number % 9),
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.9,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def listen(stack: RunningStack, body: dict[str, Any], key: str, heard: Heard) -> None:
    """Once, on a connection of its own. Raises httpx.HTTPError where it breaks."""
    headers = {"Authorization": f"Bearer {stack.key}", "Idempotency-Key": key}
    heard.events.clear()
    async with (
        httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=STACK_PATIENCE_S) as http,
        http.stream("POST", "/v1/completions", json=body) as reply,
    ):
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                heard.is_done = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                assert "error" not in event, event
                heard.events.append(event)


async def insist(stack: RunningStack, body: dict[str, Any], key: str, heard: Heard) -> None:
    """Asks again, until it is complete."""
    async with asyncio.timeout(4 * STACK_PATIENCE_S):
        while not heard.is_done:
            try:
                await listen(stack, body, key, heard)
            except httpx.HTTPError:
                heard.before.append(heard.text)
                await asyncio.sleep(0.1)


async def killed_under(stack: RunningStack, streams: int, tokens: int) -> list[Heard]:
    """That many streams; when half of all gateways' have begun, the first gateway is killed."""
    all_heard = [Heard() for _ in range(streams)]
    name = f"killed-{streams}-{tokens}-{stack.child('gateway-0')['restarts']}"
    asking = [
        asyncio.create_task(insist(stack, body_of(number, tokens), f"{name}-{number}", heard))
        for number, heard in enumerate(all_heard)
    ]
    async with asyncio.timeout(STACK_PATIENCE_S):
        while sum(len(heard.events) > 2 for heard in all_heard) < streams * 0.5:
            await asyncio.sleep(0.01)
    stack.signal("gateway-0", signal.SIGKILL)
    await asyncio.gather(*asking)
    return all_heard


def assert_told_once(all_heard: Sequence[Heard], tokens: int) -> None:
    """All of it, what came before the connection broke as its beginning, and not a token more."""
    for heard in all_heard:
        assert heard.is_done and all(heard.text.startswith(before) for before in heard.before)
        reasons = [choice["finish_reason"] for event in heard.events for choice in event["choices"]]
        assert [reason for reason in reasons if reason] == ["length"]
        assert heard.events[-1]["usage"]["completion_tokens"] == tokens
        assert len({event["id"] for event in heard.events}) == 1
    cut = sum(any(heard.before) for heard in all_heard)
    assert cut >= len(all_heard) // 8, "connections are dealt out evenly: half should have been cut"


async def assert_as_undisturbed(stack: RunningStack, all_heard: Sequence[Heard], tokens: int) -> None:
    """Those that were cut and have a seed read as one that nothing has happened to; eight of them."""
    cut = [number for number, heard in enumerate(all_heard) if any(heard.before) and number % SEEDED == 0]
    for number in cut[:8]:
        again = Heard()
        await listen(stack, body_of(number, tokens), f"undisturbed-{tokens}-{number}", again)
        assert again.text == all_heard[number].text


async def test_a_killed_gateway_is_gone_on_for(pair: RunningStack) -> None:
    before = pair.child("gateway-0")["restarts"]
    all_heard = await killed_under(pair, 12, 300)
    assert_told_once(all_heard, 300)
    await assert_as_undisturbed(pair, all_heard, 300)
    await asyncio.to_thread(pair.until_restarted, "gateway-0", restarts=before + 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_killed_gateway_under_200_streams(pair: RunningStack) -> None:
    before = pair.child("gateway-0")["restarts"]
    all_heard = await killed_under(pair, 200, 400)
    assert_told_once(all_heard, 400)
    await assert_as_undisturbed(pair, all_heard, 400)
    await asyncio.to_thread(pair.until_restarted, "gateway-0", restarts=before + 1)


async def test_one_key_is_one_answer_at_both(pair: RunningStack) -> None:
    """Again and again, on new connections that the system deals out; and only for the same request."""
    body, all_heard = body_of(1, 20), [Heard() for _ in range(12)]
    for heard in all_heard:
        await listen(pair, body, "twelve times", heard)
    assert all(heard.is_done for heard in all_heard)
    assert len({json.dumps(heard.events) for heard in all_heard}) == 1
    headers = {"Authorization": f"Bearer {pair.key}", "Idempotency-Key": "twelve times"}
    async with httpx.AsyncClient(base_url=pair.url, headers=headers, timeout=STACK_PATIENCE_S) as http:
        reply = await http.post("/v1/completions", json=body_of(2, 20))
        assert reply.status_code == 422, reply.text
        assert reply.json()["error"]["code"] == "idempotency_key_reused"
        reply = await http.post("/v1/completions", json=body, headers={"Idempotency-Key": "x" * 256})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "Idempotency-Key"


async def response_events(
    stack: RunningStack, name: str | None, after: int | None = None, most: int | None = None
) -> list[dict[str, Any]]:
    """Of a new response, or of one that is there; left after so many."""
    headers = {"Authorization": f"Bearer {stack.key}"}
    found: list[dict[str, Any]] = []
    async with httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=STACK_PATIENCE_S) as http:
        if name is None:
            body = {"model": "tiny_chat", "input": "Tell me a story.", "stream": True, "temperature": 1.0}
            asked = http.stream("POST", "/v1/responses", json=body, headers={"Idempotency-Key": f"{after}"})
        else:
            query = {"stream": "true"} | ({} if after is None else {"starting_after": str(after)})
            asked = http.stream("GET", f"/v1/responses/{name}", params=query)
        async with asked as reply:
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                if line.startswith("data: "):
                    found.append(json.loads(line[6:]))
                    if len(found) == most:
                        break
    return found


async def test_a_response_goes_on_after_the_event_that_was_last(pair: RunningStack) -> None:
    first = await response_events(pair, None, most=8)
    name = first[0]["response"]["id"]
    for _ in range(6):
        rest = await response_events(pair, name, after=first[-1]["sequence_number"])
        both = first + rest
        assert [event["sequence_number"] for event in both] == list(range(len(both)))
        assert both[-1]["type"] in ("response.completed", "response.incomplete")
        said = "".join(event["delta"] for event in both if event["type"] == "response.output_text.delta")
        assert both[-1]["response"]["output"][0]["content"][0]["text"] == said
    headers = {"Authorization": f"Bearer {pair.key}"}
    async with httpx.AsyncClient(base_url=pair.url, headers=headers, timeout=STACK_PATIENCE_S) as http:
        unknown = await http.get("/v1/responses/resp_none?stream=true")
        assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "response_not_found"
        odd = await http.get(f"/v1/responses/{name}?stream=true&starting_after=-1")
        assert odd.status_code == 400 and odd.json()["error"]["param"] == "starting_after"


async def test_a_response_in_the_background_outlives_its_gateway(pair: RunningStack) -> None:
    """Polled at whichever gateway meanwhile, which takes it from nobody."""
    before = pair.child("gateway-0")["restarts"]
    headers = {"Authorization": f"Bearer {pair.key}"}
    body = {"model": "tiny_chat", "input": "Tell me a story.", "temperature": 0, "background": True}

    async def asked(http: httpx.AsyncClient, method: str, path: str, **more: Any) -> dict[str, Any]:
        reply = await http.request(method, f"{pair.url}/v1/responses{path}", headers=headers, **more)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    async def one() -> str:
        async with httpx.AsyncClient(timeout=STACK_PATIENCE_S) as http:
            return str((await asked(http, "POST", "", json=body))["id"])

    async def status(name: str) -> dict[str, Any]:
        async with httpx.AsyncClient(timeout=STACK_PATIENCE_S) as http:
            return await asked(http, "GET", f"/{name}")

    names = await asyncio.gather(*(one() for _ in range(12)))
    pair.signal("gateway-0", signal.SIGKILL)
    await asyncio.to_thread(pair.until_restarted, "gateway-0", restarts=before + 1)
    found = await asyncio.gather(*map(status, names))
    async with asyncio.timeout(STACK_PATIENCE_S):
        while any(each["status"] == "in_progress" for each in found):
            await asyncio.sleep(0.2)
            found = await asyncio.gather(*map(status, names))
    assert {each["status"] for each in found} <= {"completed", "incomplete"}
    assert len({each["output"][0]["content"][0]["text"] for each in found}) == 1


def test_gateways_at_rest_say_little(pair: RunningStack) -> None:
    """Each greets a newcomer once, and not those that it knows, nor itself."""
    for row in pair.status()["services"]:
        if row["service"] == "gateway":
            assert row["details"]["heartbeats"] <= 4 * row["uptime_s"] + 20
