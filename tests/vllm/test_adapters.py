"""LoRA adapters: greedy answers are those of vLLM with the same adapters, through engine and stack."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import NotFoundError

from tests.stack.client import Question, assert_same
from tests.stack.prompts import long_questions
from tests.stack.running import TINY_CHAT, RunningStack, running_stack
from tests.stack.test_prefix_cache import Tenant, prompt_of
from tests.vllm.models import MODULES, make_adapter
from tests.vllm.test_models import generated

pytestmark = [pytest.mark.timeout(900)]
NAMES = ("tiny_chat", "tiny_chat:a", "tiny_chat:b")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two, of different ranks and modules."""
    folder = tmp_path_factory.mktemp("adapters")
    make_adapter(TINY_CHAT, folder / "a", 4, MODULES[:3])
    make_adapter(TINY_CHAT, folder / "b", 12)
    return folder


@pytest.fixture(scope="module")
def reference(adapters: Path) -> dict[str, Any]:
    return generated(TINY_CHAT, "1", "v1", "cpu", "float32", str(adapters))


@pytest.fixture(scope="module")
def stack(adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    told = json.dumps({name: str(adapters / name) for name in ("a", "b")})
    run_dir = tmp_path_factory.mktemp("stack") / "run"
    settings = (f"worker.vllm.adapters={told}",)
    with running_stack(run_dir, settings=settings, flags=("--engine", "vllm")) as running:
        yield running


def test_the_engine_answers_as_vllm_does(reference: dict[str, Any]) -> None:
    assert reference["engine"] == reference["vllm"]
    assert len({tuple(answer) for answer in reference["vllm"]}) == len(reference["vllm"])


@pytest.mark.parametrize("words", [("2", "v1", "cpu"), ("1", "v2", "cpu")])
def test_so_do_several_ranks_and_model_runner_v2(
    adapters: Path, reference: dict[str, Any], words: tuple[str, ...]
) -> None:
    assert generated(TINY_CHAT, *words, "float32", str(adapters))["engine"] == reference["vllm"]


def test_so_does_a_stack(reference: dict[str, Any], stack: RunningStack) -> None:
    asked, tokens = reference["prompts"], len(reference["vllm"][0])
    how: dict[str, Any] = {"max_tokens": tokens, "temperature": 0}
    more = {"ignore_eos": True, "return_token_ids": True}
    found = []
    with stack.openai_client() as client:
        assert [model.id for model in client.models.list()] == list(NAMES)
        for name in NAMES:
            told = client.completions.create(model=name, prompt=asked, extra_body=more, **how)
            assert told.model == name
            found += [choice.to_dict()["token_ids"] for choice in told.choices]
        with pytest.raises(NotFoundError, match="the model 'tiny_chat:c' does not exist"):
            client.completions.create(model="tiny_chat:c", prompt="x")
    assert found == reference["vllm"]


def test_adapters_share_no_prefix(stack: RunningStack) -> None:
    tenant, prompt = Tenant(stack), prompt_of(3, 400)
    told = [tenant.complete(prompt, model=name) for name in (*NAMES, *NAMES)]
    tenant.close()
    assert [each.cached_tokens for each in told] == [0, 0, 0, 384, 384, 384]
    assert [each.text for each in told[:3]] == [each.text for each in told[3:]]


async def test_answers_survive_a_killed_worker(stack: RunningStack) -> None:
    asked = long_questions(12, least_tokens=240, step_tokens=4, longest_words=160, seed=5)
    questions = [
        Question(each.prompt, {**each.fields, "model": NAMES[at % 3]}) for at, each in enumerate(asked)
    ]
    expected = await asyncio.to_thread(stack.answers, questions[::-1])
    assert_same(await stack.ask_and_kill(questions, 200, "worker-0"), expected[::-1])
