"""A model with sliding windows borrows as any other, live: an answer beyond one worker's KV, and its text."""

import asyncio
import random
from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from tests.stack.client import Answer, Question
from tests.stack.prompts import passage
from tests.stack.reference import ReferenceModel
from tests.stack.running import RunningStack, running_stack
from tests.stack.small_workers import OWN_TOKENS, SETTINGS, until_announced
from tests.stack.test_other_models import copy_tokenizer

pytestmark = [pytest.mark.stack, pytest.mark.slow]
WINDOW_TOKENS = 200


def make_gemma(folder: Path) -> None:
    """A small Gemma 2 checkpoint with random weights: every other layer sees a window."""
    tokenizer = copy_tokenizer(folder)
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=WINDOW_TOKENS,
        max_position_embeddings=4096,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )
    Gemma2ForCausalLM(config).save_pretrained(folder)


async def ask(stack: RunningStack, questions: list[Question]) -> list[Answer]:
    await until_announced(stack, 1.6 * OWN_TOKENS)
    return await stack.client().ask_all(questions)


def test_an_answer_beyond_a_worker(tmp_path: Path) -> None:
    folder = tmp_path / "random_gemma"
    make_gemma(folder)
    text = passage(int(1.4 * OWN_TOKENS / 1.19), random.Random(5))
    question = Question(text, {"max_tokens": 40, "temperature": 0, "ignore_eos": True})
    with running_stack(tmp_path / "run", model=folder, workers=3, settings=SETTINGS) as stack:
        (answer,) = asyncio.run(ask(stack, [question]))
    reference = ReferenceModel(folder)
    expected = reference.greedy(text, 40)
    assert answer.complete and len(reference.prompt_tokens(text)) > OWN_TOKENS
    assert answer.text == expected.text or reference.is_near_tie(expected, answer.text)
