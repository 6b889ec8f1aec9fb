"""Any decoder folder is served: a random-weight Qwen and a random-weight OPT, with tiny_chat's tokenizer.

Of two workers with different weights under one name the later is refused, and nobody is answered by it.

Greedy text through the whole stack is what transformers' `generate` gives, also under preemption.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from tests.stack.client import Question
from tests.stack.prompts import ASKED, STORIES, mixed
from tests.stack.reference import Reference, ReferenceModel
from tests.stack.running import TINY_CHAT, running_stack

pytestmark = pytest.mark.stack


def copy_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Puts tiny_chat's tokenizer into `folder`."""
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_CHAT / name, folder)
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer


def make_qwen(folder: Path) -> None:
    """A small Qwen2 checkpoint with random weights."""
    tokenizer = copy_tokenizer(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    known: dict[str, Any] = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, **sizes}
    config = Qwen2Config(num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.2, **known)
    Qwen2ForCausalLM(config).save_pretrained(folder)


def make_opt(folder: Path) -> None:
    """A small OPT checkpoint with random weights: learned positions, biases, ReLU, no grouped heads."""
    tokenizer = copy_tokenizer(folder)
    torch.manual_seed(0)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    known: dict[str, Any] = {name: getattr(tokenizer, name) for name in names}
    known |= {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 256, "num_hidden_layers": 3}
    known |= {"num_attention_heads": 4, "max_position_embeddings": 1024, "init_std": 0.2}
    config = OPTConfig(vocab_size=len(tokenizer), **known)
    OPTForCausalLM(config).save_pretrained(folder)


@pytest.mark.parametrize("make", [make_qwen, make_opt])
async def test_a_folder_is_served(tmp_path: Path, make: Callable[[Path], None]) -> None:
    folder = tmp_path / make.__name__.replace("make", "random")
    make(folder)
    prompts = mixed(6, longest_words=60)
    with running_stack(tmp_path / "run", model=folder, workers=1) as stack:
        questions = [Question(prompt, {"temperature": 0, "max_tokens": 24}) for prompt in prompts]
        answers = await stack.client().ask_all(questions)
    reference = ReferenceModel(folder)
    expected = [reference.greedy(prompt, 24) for prompt in prompts]
    assert len({each.text for each in expected}) > 1
    for answer, wanted in zip(answers, expected, strict=True):
        assert answer.complete
        assert answer.text == wanted.text or reference.is_near_tie(wanted, answer.text)


PROMPT = "Tell me a short story."


def other_weights(folder: Path) -> Path:
    """`tiny_chat` with one tensor turned around."""
    shutil.copytree(TINY_CHAT, folder, ignore=shutil.ignore_patterns("*.md"))
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(tensors) if "mlp" in name)
    save_file({**tensors, name: -tensors[name]}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


async def test_it_gets_no_work_and_status_and_log_say_why(tmp_path: Path) -> None:
    model = other_weights(tmp_path / "tiny_chat")
    with running_stack(tmp_path / "run", settings=(f"worker-1.model={model}",)) as stack:
        client = stack.client()
        questions = [Question(PROMPT, {"temperature": 0, "max_tokens": 40}) for _ in range(8)]
        answers = await client.ask_all(questions)
        assert all(answer.complete for answer in answers) and len({answer.text for answer in answers}) == 1
        rows = {row["worker"]: row for row in stack.details("scheduler-0")["workers"]}
        assert sorted(row["sync"] for row in rows.values()) == ["in_step", "refused"], rows
        (refused,) = [row["refused"] for row in rows.values() if row["sync"] == "refused"]
        assert "different weights" in refused
        assert "model_mismatch" in (stack.run_dir / "logs" / "scheduler-0.log").read_text()


PROMPTS = mixed(16, longest_words=600, asked=(*ASKED, *STORIES, *STORIES))
MAX_TOKENS = 96
TIGHT = "worker.kv_blocks=56"
"""896 tokens a worker: the longest prompt and its answer just fit, alone."""


@pytest.fixture(scope="module")
def references() -> list[Reference]:
    model = ReferenceModel(TINY_CHAT)
    return [model.greedy(prompt, MAX_TOKENS) for prompt in PROMPTS]


async def test_many_prompts_under_preemption(tmp_path: Path, references: list[Reference]) -> None:
    questions = [Question(prompt, {"temperature": 0, "max_tokens": MAX_TOKENS}) for prompt in PROMPTS]
    settings = (TIGHT, "worker.pie.enabled=false", "scheduler.policy=vllm")  # it admits what will not fit
    with running_stack(tmp_path / "run", settings=settings) as stack:
        answers = await stack.client().ask_all(questions)
        while not (preemptions := stack.details("scheduler-0")["preemptions"]) and len(answers) < 160:
            answers += await stack.client().ask_all(questions)
    rounds = len(answers) // len(questions)
    model = ReferenceModel(TINY_CHAT)
    different = [
        (answer.text, reference.text)
        for answer, reference in zip(answers, references * rounds, strict=True)
        if answer.text != reference.text and not model.is_near_tie(reference, answer.text)
    ]
    assert different == [] and preemptions > 0 and all(answer.complete for answer in answers)
    assert sum(a.text != r.text for a, r in zip(answers, references * rounds, strict=True)) <= rounds
