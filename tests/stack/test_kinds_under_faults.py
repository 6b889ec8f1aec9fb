"""Requests of all kinds while processes are killed and frozen: none is lost or doubled, all are the same.

A short version, and 500 requests under 50 faults (`-m slow`). Log-probabilities are compared to three digits:
an answer that was resumed computes what it had in one chunk instead of token by token.
"""

import asyncio
import itertools
import json
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.conformance.schemas import closed
from tests.patience import STACK_PATIENCE_S
from tests.stack.prompts import ASKED
from tests.stack.running import RunningStack, running_stack

pytestmark = pytest.mark.stack
_PARTS = {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4}
SCHEMA = closed(title={"type": "string", "maxLength": 40}, year={"type": "integer"}, parts=_PARTS)
_DAYS = closed(city={"type": "string", "maxLength": 30}, days={"type": "integer"})
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": _DAYS}}
FORM = {"type": "json_schema", "json_schema": {"name": "book", "strict": True, "schema": SCHEMA}}
KINDS: dict[str, dict[str, Any]] = {
    "json_schema": {"response_format": FORM, "max_tokens": 120},
    "tools": {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 120},
    "several": {"n": 4, "max_tokens": 70},
    "penalties": {"frequency_penalty": 0.6, "presence_penalty": 0.4, "repetition_penalty": 1.1},
    "stops": {"stop": [".", " and"], "include_stop_str_in_output": True},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "filters": {"top_k": 30, "top_p": 0.9, "min_p": 0.02, "min_tokens": 20},
    "greedy": {"temperature": 0.0},
}
VICTIMS = ("worker-0", "worker-1", "scheduler-0", "placement-0", "predictor-0", "ledger-0")
AT_ONCE = 24
WOKEN_S = 3.5
"""Longer than the others wait for a sign of life."""


def body_of(at: int) -> dict[str, Any]:
    """The kinds in turn, half of them streamed, each with a seed of its own."""
    fields = list(KINDS.values())[at % len(KINDS)]
    return {
        "model": "tiny_chat",
        "messages": [{"role": "user", "content": f"{ASKED[at % len(ASKED)]} ({at})"}],
        "max_tokens": 90,
        "temperature": 0.9,
        "seed": at,
        "stream": at // len(KINDS) % 2 == 0,
        **fields,
    }


async def ask(http: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Each choice's text, calls, reason and log-probabilities, whichever way it came.

    Raises AssertionError for an answer that is not whole, or a stream whose parts come twice."""
    if not body["stream"]:
        reply = await http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        return [_whole(choice) for choice in reply.json()["choices"]]
    choices = range(int(body.get("n", 1)))
    found = [dict[str, Any](text="", calls={}, reason=None, tokens=[]) for _ in choices]
    is_done = False
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, (await response.aread()).decode()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                is_done = True
            elif line.startswith("data: "):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    _add(found[choice["index"]], choice)
    assert is_done
    return [{**each, "calls": list(each["calls"].values())} for each in found]


def _whole(choice: dict[str, Any]) -> dict[str, Any]:
    calls = choice["message"].get("tool_calls") or []
    return {
        "text": choice["message"]["content"] or "",
        "calls": [[call["function"]["name"], call["function"]["arguments"]] for call in calls],
        "reason": choice["finish_reason"],
        "tokens": (choice["logprobs"] or {}).get("content") or [],
    }


def _add(found: dict[str, Any], choice: dict[str, Any]) -> None:
    assert found["reason"] is None, "something came after the end"
    delta = choice["delta"]
    found["text"] += delta.get("content") or ""
    for call in delta.get("tool_calls") or []:
        known = found["calls"].setdefault(call["index"], ["", ""])
        known[0] += call["function"].get("name") or ""
        known[1] += call["function"].get("arguments") or ""
    found["tokens"] += (choice.get("logprobs") or {}).get("content") or []
    found["reason"] = choice["finish_reason"]


def check_valid(at: int, choices: list[dict[str, Any]]) -> None:
    kind = list(KINDS)[at % len(KINDS)]
    assert all(choice["reason"] for choice in choices), "none is lost"
    if kind == "json_schema":
        jsonschema.validate(json.loads(choices[0]["text"]), SCHEMA)
    if kind == "tools":
        assert choices[0]["calls"] and choices[0]["reason"] == "tool_calls"
        for name, arguments in choices[0]["calls"]:
            assert name == "weather"
            jsonschema.validate(json.loads(arguments), WEATHER["function"]["parameters"])  # type: ignore[index]
    if kind == "several":
        assert len(choices) == 4
    if kind == "logprobs":
        assert "".join(token["token"] for token in choices[0]["tokens"]).strip()


def differences(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> list[str]:
    """In what they differ, by name."""
    wrong = []
    for mine, theirs in zip(found, expected, strict=True):
        wrong += [name for name in ("text", "calls", "reason") if mine[name] != theirs[name]]
        tokens = [(token["token"], len(token["top_logprobs"])) for token in mine["tokens"]]
        if tokens != [(token["token"], len(token["top_logprobs"])) for token in theirs["tokens"]]:
            wrong.append("tokens")
        elif any(
            abs(a["logprob"] - b["logprob"]) > 1e-3
            for a, b in zip(mine["tokens"], theirs["tokens"], strict=True)
        ):
            wrong.append("logprobs")
    return wrong


async def answers(stack: RunningStack, count: int) -> list[list[dict[str, Any]]]:
    headers = {"Authorization": f"Bearer {stack.key}"}
    gate = asyncio.Semaphore(AT_ONCE)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=stack.url, headers=headers, timeout=4 * STACK_PATIENCE_S, limits=limits
    ) as http:

        async def one(at: int) -> list[dict[str, Any]]:
            async with gate:
                return await ask(http, body_of(at))

        return list(await asyncio.gather(*(one(at) for at in range(count))))


class Faults:
    """One after the other: three of four kill somebody, the fourth freezes a worker for a while."""

    def __init__(self, stack: RunningStack, seed: int) -> None:
        self.stack = stack
        self.done = 0
        self._dice = random.Random(seed)

    async def one(self) -> None:
        number = self.done
        name = VICTIMS[number % 2] if number % 4 == 3 else self._dice.choice(VICTIMS)
        row = self.stack.child(name)
        if number % 4 == 3:
            self.stack.signal(name, signal.SIGSTOP)
            try:
                await asyncio.sleep(WOKEN_S)
            finally:
                self.stack.signal(name, signal.SIGCONT)
        else:
            self.stack.signal(name, signal.SIGKILL)
            await asyncio.to_thread(self.stack.until_restarted, name, restarts=row["restarts"] + 1)
        self.done += 1


@asynccontextmanager
async def disturbed(faults: Faults, pause_s: float) -> AsyncIterator[None]:
    """Faults for as long as the block runs."""

    async def go_on() -> None:
        while True:
            await asyncio.sleep(pause_s)
            await faults.one()

    task = asyncio.create_task(go_on())
    try:
        yield
    finally:
        task.cancel()
        ended = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(ended[0], asyncio.CancelledError), ended


async def compare(stack: RunningStack, requests: int, least_faults: int, pause_s: float) -> None:
    """Rounds of the same requests, undisturbed once, until there were so many faults."""
    expected = await answers(stack, requests)
    for at, choices in enumerate(expected):
        check_valid(at, choices)
    faults, began_s = Faults(stack, seed=requests), time.monotonic()
    for number in itertools.count():
        async with disturbed(faults, pause_s):
            found = await answers(stack, requests)
        for at, choices in enumerate(found):
            check_valid(at, choices)
        wrong = {at: names for at in range(requests) if (names := differences(found[at], expected[at]))}
        print(f"round {number}: {faults.done} faults, {time.monotonic() - began_s:.0f} s, different: {wrong}")
        for at in wrong:
            print(f"request {at}: {found[at]}\nundisturbed: {expected[at]}")
        assert wrong == {}
        if faults.done >= least_faults:
            return


async def test_forty_requests(stack: RunningStack) -> None:
    await compare(stack, 40, least_faults=3, pause_s=0.4)


@pytest.mark.slow
@pytest.mark.timeout(1500)
async def test_five_hundred_requests_under_fifty_faults(tmp_path: Path) -> None:
    """The only scheduler is killed three times in a row here, with a lease of 3 s each time: a request waits
    longer for it than the 10 s that are the default."""
    with running_stack(tmp_path / "run", settings=("gateway.admit_timeout_s=30",)) as patient:
        await compare(patient, 500, least_faults=50, pause_s=0.3)
