"""Any decoder folder is served: a random-weight Qwen made here, with tiny_chat's tokenizer."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from tests.stack.client import Question
from tests.stack.prompts import mixed
from tests.stack.reference import ReferenceModel
from tests.stack.running import TINY_CHAT, running_stack

pytestmark = pytest.mark.stack


def make_qwen(folder: Path) -> None:
    """A small Qwen2 checkpoint with random weights."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_CHAT)
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
    tokenizer.save_pretrained(folder)


async def test_a_qwen_folder_is_served(tmp_path: Path) -> None:
    folder = tmp_path / "random_qwen"
    make_qwen(folder)
    prompts = mixed(6, longest_words=60)
    with running_stack(tmp_path / "run", model=folder, workers=1) as stack:
        questions = [Question(prompt, {"temperature": 0, "max_tokens": 24}) for prompt in prompts]
        answers = await stack.client().ask_all(questions)
    reference = ReferenceModel(folder)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = reference.greedy(prompt, 24)
        assert answer.complete
        assert answer.text == expected.text or reference.is_near_tie(expected, answer.text)
