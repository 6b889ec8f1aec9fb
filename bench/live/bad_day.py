"""Trouble for a running stack beside deaths and hangs: poisoned requests, a full disk, one-off requests."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx

from services.stack.rundir import RunDirectory

_DEADLINE_S = 120.0
_DISK_MB = 400
_PER_S = 10.0


def client(run_dir: Path) -> httpx.AsyncClient:
    """Return a client of the stack in `run_dir`."""
    run = RunDirectory(run_dir)
    headers = {"Authorization": f"Bearer {run.credentials().api_key}"}
    url = run.read_state()["url"]
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=_DEADLINE_S, trust_env=False)


async def poisoned(run_dir: Path, body: dict[str, Any]) -> tuple[str, list[str]]:
    """Stream an answer whose worker is killed whenever it runs there; it has to be long enough not to end
    first. Return the error at its end, or "", and the killed workers."""
    said, killed = "", list[str]()
    request = {"max_tokens": 3900, "ignore_eos": True, "stream": True, **body}
    async with client(run_dir) as http, http.stream("POST", "/v1/completions", json=request) as answer:
        killing = asyncio.create_task(_kill(run_dir, http, answer.headers["x-kvasir-request-id"], killed))
        async for line in answer.aiter_lines():
            said = line if "error" in line else said
        killing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await killing
    return said, killed


async def _kill(run_dir: Path, http: httpx.AsyncClient, request_id: str, killed: list[str]) -> None:
    """Kill the worker of each attempt of a request as soon as it has started there, until cancelled."""
    seen: set[int] = set()
    while True:
        state = json.loads((run_dir / "state.json").read_text())
        told = (await http.get(f"{state['operator_url']}/ui/requests/{request_id}")).json()
        started = {each["attempt"]: each["worker"] for each in told["events"] if each["kind"] == "started"}
        if started and (latest := max(started)) not in seen:
            pids = {child["name"]: child["pid"] for child in state["children"]}
            os.kill(pids[started[latest]], signal.SIGKILL)
            seen.add(latest)
            killed.append(started[latest])
        await asyncio.sleep(0.1)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """Mount a file system of `_DISK_MB` at `folder` for the block; None if this process may not."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MB}m", "tmpfs", str(folder)]
    if os.getuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


async def filled(disk: Path, for_s: float) -> None:
    """Fill a disk to the last byte, and again when something was freed, for `for_s` seconds."""
    until_s = time.monotonic() + for_s
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError), (disk / "fill").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(65_536))
        await asyncio.sleep(0.5)
    (disk / "fill").unlink()


async def one_offs(run_dir: Path, model: str, dice: Random, for_s: float) -> int:
    """Send ten requests per second, each with a new name: as schema, tool, model, path, in an aborted stream
    or a stored response. Return how many were not answered as they should be."""
    began_s, failed = time.monotonic(), 0
    async with client(run_dir) as http:

        async def send(number: int, name: str) -> None:
            nonlocal failed
            path, body, status = _one_off(number, name)
            try:
                async with http.stream("POST", path, json={"model": model, **body}) as answer:
                    await (anext(answer.aiter_lines(), "") if "stream" in body else answer.aread())
                    failed += answer.status_code != status
            except httpx.HTTPError:
                failed += 1

        async with asyncio.TaskGroup() as tasks:
            for number in range(int(_PER_S * for_s)):
                await asyncio.sleep(began_s + number / _PER_S - time.monotonic())
                tasks.create_task(send(number, f"n{dice.getrandbits(64):x}"))
    return failed


def _one_off(number: int, name: str) -> tuple[str, dict[str, Any], int]:
    """Return path, body and due status."""
    chats, chat = "/v1/chat/completions", {"messages": [{"role": "user", "content": name}], "max_tokens": 24}
    schema = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
    answer_format = {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}
    tool = {"type": "function", "function": {"name": name, "parameters": schema}}
    kinds: list[tuple[str, dict[str, Any], int]] = [
        (chats, {**chat, "response_format": answer_format}, 200),
        (chats, {**chat, "tools": [tool]}, 200),
        (chats, {**chat, "model": name}, 404),
        (f"/v1/{name}", chat, 404),
        (chats, {**chat, "max_tokens": 500, "stream": True}, 200),
        ("/v1/responses", {"input": name, "max_output_tokens": 16, "store": True}, 200),
    ]
    return kinds[number % len(kinds)]
