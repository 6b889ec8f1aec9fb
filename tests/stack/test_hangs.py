"""Processes hang for ever while streams run: each is replaced, every answer arrives whole and unchanged."""

import asyncio
import json
import signal
from pathlib import Path

import httpx
import pytest

from tests.stack.client import Answer, Question, assert_same
from tests.stack.prompts import long_questions
from tests.stack.running import ROOT, RunningStack, running_stack

pytestmark = pytest.mark.stack
STREAMS = 8
MIDWAY = 50
STUCK = """
import os, sys, time
sys.path.insert(0, {root!r})
if sys.orig_argv[1:3] == ["-m", "services.worker"]:
    from services.worker.engine_thread import Runner
    compute = Runner._compute
    def compute_or_hang(self, rows):
        if os.path.exists({flag!r}) and len(rows) > 1:
            os.unlink({flag!r})
            time.sleep(10_000)
        return compute(self, rows)
    Runner._compute = compute_or_hang
"""
"""A module that Python imports at its start: a worker's engine hangs once, in a step of several rows."""


def questions() -> list[Question]:
    return long_questions(STREAMS, least_tokens=60, step_tokens=2, longest_words=120, seed=1)


@pytest.fixture(scope="module")
def undisturbed(stack: RunningStack) -> list[Answer]:
    answers = asyncio.run(stack.client().ask_all(questions()))
    assert all(answer.complete for answer in answers)
    return answers


@pytest.mark.parametrize("names", ["scheduler-0", "nats", "placement-0 predictor-0 ledger-0 worker-1"])
async def test_a_stopped_process_is_replaced(
    stack: RunningStack, undisturbed: list[Answer], names: str
) -> None:
    before = {name: stack.child(name)["restarts"] for name in names.split()}

    async def stop() -> None:
        for name in before:
            stack.signal(name, signal.SIGSTOP)

    answers = await stack.client().ask_all(questions(), midway=stop, after=MIDWAY)
    assert_same(answers, undisturbed)
    for name, restarts in before.items():
        await asyncio.to_thread(stack.until_restarted, name, restarts=restarts + 1)
        assert stack.child(name)["last_exit"].startswith("hung: no answer for ")


async def test_a_stopped_gateway_is_replaced(stack: RunningStack, undisturbed: list[Answer]) -> None:
    before = stack.child("gateway-0")["restarts"]
    stack.signal("gateway-0", signal.SIGSTOP)
    await asyncio.sleep(3.5)
    said = await asyncio.to_thread(stack.command, "status")
    assert "well: no: gateway-0 hangs: no answer for " in said.stdout
    await asyncio.to_thread(stack.until_restarted, "gateway-0", restarts=before + 1)
    assert_same(await stack.client().ask_all(questions()), undisturbed)


async def test_placement_is_asked_for_a_fifth_of_a_second(stack: RunningStack) -> None:
    """Every chat waited for as long as it hung."""
    stack.signal("placement-0", signal.SIGSTOP)
    headers, body = {"Authorization": f"Bearer {stack.key}"}, {"prompt": "Once", "max_tokens": 2}
    async with httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=60, trust_env=False) as client:
        answer = await client.post("/v1/completions", json=body | {"model": stack.model.name})
    assert answer.status_code == 200, answer.text
    request_id = answer.headers["x-kvasir-request-id"]
    told = json.loads((await asyncio.to_thread(stack.command, "explain", request_id, "--json")).stdout)
    events = {event["kind"]: event for event in told["events"] if event["instance"] == "scheduler-0"}
    assert events["placed"]["why"] == "placement did not answer"
    assert events["placed"]["unix_s"] - events["submitted"]["unix_s"] < 2.0, told["events"]
    (queued,) = (cause for cause in told["account"]["causes"] if cause["cause"] == "queued for a worker")
    assert "placement did not answer" in queued["note"]


async def test_an_engine_that_never_returns_is_replaced(
    tmp_path: Path, undisturbed: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process answered, so that nobody noticed."""
    (tmp_path / "sitecustomize.py").write_text(STUCK.format(flag=str(tmp_path / "flag"), root=str(ROOT)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("KVASIR_STACK__PRELOAD", "false")
    with running_stack(tmp_path / "run") as stack:
        (tmp_path / "flag").touch()
        assert_same(await stack.client().ask_all(questions()), undisturbed)
        assert not (tmp_path / "flag").exists()
        ends = [str(stack.child(name)["last_exit"]) for name in ("worker-0", "worker-1")]
        assert any(end.startswith("hung: engine of worker-") for end in ends)
