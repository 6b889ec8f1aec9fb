"""Two models in one stack: each has its own workers, and is not disturbed by the other's."""

import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from shared.errors import ConfigError
from sim.replay import read_recording
from tests.conformance.schemas import violations
from tests.patience import STACK_PATIENCE_S
from tests.stack.running import TINY_CHAT, RunningStack, running_stack

pytestmark = pytest.mark.stack
ASK: list[Any] = [{"role": "user", "content": "Tell me a short story about a dog."}]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """tiny_chat, and a model of its shape that says other things; two workers each; an alias."""
    other = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(TINY_CHAT, other, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    torch.manual_seed(5)
    model: Any = AutoModelForCausalLM.from_pretrained(TINY_CHAT, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(other)
    flags = ("--model", str(other))
    settings = ('gateway.aliases={"gpt-4o": "tiny_chat"}',)
    run_dir = tmp_path_factory.mktemp("stack") / "run"
    with running_stack(run_dir, workers=4, flags=flags, settings=settings) as stack:
        yield stack


@pytest.fixture(scope="module")
def client(both: RunningStack) -> Iterator[openai.OpenAI]:
    with both.openai_client() as made:
        yield made


def said(client: openai.OpenAI, model: str, tokens: int = 60) -> str:
    reply = client.chat.completions.create(
        model=model, messages=ASK, max_tokens=tokens, temperature=0, extra_body={"ignore_eos": True}
    )
    assert reply.usage and reply.usage.completion_tokens == tokens
    return str(reply.choices[0].message.content)


def test_they_are_listed_and_each_says_its_own(client: openai.OpenAI, both: RunningStack) -> None:
    assert [model.id for model in client.models.list()] == ["tiny_chat", "other", "gpt-4o"]
    headers = {"Authorization": f"Bearer {both.key}"}
    listed = httpx.get(f"{both.url}/v1/models", headers=headers, timeout=STACK_PATIENCE_S).json()
    assert violations("ListModelsResponse", listed) == []
    first, second = said(client, "tiny_chat"), said(client, "other")
    assert first != second and (said(client, "gpt-4o"), said(client, "other")) == (first, second)
    reply = client.chat.completions.create(model="gpt-4o", messages=ASK, max_tokens=3)
    assert reply.model == "tiny_chat" and client.models.retrieve("gpt-4o").id == "gpt-4o"
    one, two = (client.embeddings.create(model=name, input="a").data[0] for name in ("tiny_chat", "other"))
    assert one.embedding != two.embedding


def test_others_are_refused_and_those_that_are_there_are_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is 'tiny_chat', 'other', 'gpt-4o'"):
        said(client, "gpt-5")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")


def test_sequences_are_where_their_model_is(client: openai.OpenAI, both: RunningStack) -> None:
    workers = both.details("scheduler-0")["workers"]
    homes = {row["worker"]: row["model"] for row in workers}
    assert homes == {f"worker-{n}": "other" if n % 2 else "tiny_chat" for n in range(4)}
    placed = {row["worker"]: row["model"] for row in both.details("placement-0")["workers"]}
    assert placed == homes


def test_a_death_in_one_is_nothing_to_the_other(client: openai.OpenAI, both: RunningStack) -> None:
    """Chats with both while both workers of `other` die: all answers are whole and the same, and the workers
    of tiny_chat go on."""
    expected = {model: said(client, model, 200) for model in ("tiny_chat", "other")}
    found: dict[str, list[str]] = {"tiny_chat": [], "other": []}
    errors: list[BaseException] = []

    def ask(model: str) -> None:
        try:
            for _ in range(2):
                found[model].append(said(client, model, 200))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(model,)) for model in found for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    both.signal("worker-1", signal.SIGKILL)
    both.signal("worker-3", signal.SIGKILL)
    for thread in threads:
        thread.join(2 * STACK_PATIENCE_S)
    assert not errors and not any(thread.is_alive() for thread in threads)
    for model, texts in found.items():
        assert texts == [expected[model]] * 4
    for name in ("worker-1", "worker-3"):
        both.until_restarted(name, restarts=1)
    assert [both.child(name)["restarts"] for name in ("worker-0", "worker-2")] == [0, 0]


def test_a_stack_needs_a_worker_for_each(tmp_path: Path) -> None:
    stack = RunningStack(tmp_path / "run")
    done = stack.command("up", "--workers", "1", "--model", str(TINY_CHAT), "--model", f"b={TINY_CHAT}")
    assert done.returncode == 2 and "write --workers 2" in done.stderr


SCALED = ("placement.policy=mell", "placement.scale=true", "placement.idle_s=1", "placement.epoch_s=0.2")


@pytest.mark.slow  # test_mell has the same of one model in every run
def test_idle_workers_of_each_model_stop_and_the_last_of_each_stays(tmp_path: Path) -> None:
    flags = ("--model", f"twin={TINY_CHAT}")
    with running_stack(tmp_path / "run", workers=4, flags=flags, settings=SCALED) as stack:
        until_parked(stack)
        shown = {row["model"]: row for row in stack.details("placement-0")["models"]}
        assert {name: row["wanted_workers"] for name, row in shown.items()} == {"tiny_chat": 1, "twin": 1}
        with stack.openai_client() as client:
            assert said(client, "tiny_chat") == said(client, "twin")
        until_parked(stack)
        learned = {row["model"]: row["finished"] for row in stack.details("predictor-0")["models"]}
        assert learned == {"tiny_chat": 1, "twin": 1}


def until_parked(stack: RunningStack) -> None:
    """One of the two workers of each model, whichever."""
    deadline_s = time.monotonic() + STACK_PATIENCE_S
    while True:
        parked = [number for number in range(4) if stack.child(f"worker-{number}")["state"] == "parked"]
        if sorted(number % 2 for number in parked) == [0, 1]:
            return
        assert time.monotonic() < deadline_s, (parked, stack.details("placement-0"))
        time.sleep(0.2)


def test_both_are_named_and_recorded(both: RunningStack, tmp_path: Path) -> None:
    """With two models `record` was a KeyError, and `status` named the first."""
    path = tmp_path / "recording.jsonl"
    assert both.command("record", "--out", str(path)).returncode == 0
    with pytest.raises(ConfigError, match=r"of 2 models \(other, tiny_chat\)"):
        read_recording(path)
    assert "model tiny_chat, other" in both.command("status").stdout
