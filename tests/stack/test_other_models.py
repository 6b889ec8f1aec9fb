"""Any decoder folder is served: a random-weight Qwen and a random-weight OPT, with tiny_chat's tokenizer."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from tests.stack.client import Question
from tests.stack.prompts import mixed
from tests.stack.reference import ReferenceModel
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
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def make_opt(folder: Path) -> None:
    """A small OPT checkpoint with random weights: learned positions, biases, ReLU, no grouped heads."""
    tokenizer = copy_tokenizer(folder)
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        word_embed_proj_dim=128,
        ffn_dim=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=1024,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        init_std=0.2,
    )
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
