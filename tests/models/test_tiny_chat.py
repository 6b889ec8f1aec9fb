"""The shipped chat model: its shape, its files, that it ends by itself, and that lengths follow the prompt.

Greedy answers in float32, so that they are the same on every machine; the texts themselves are not tested.
"""

from __future__ import annotations

import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).resolve().parents[2] / "models" / "tiny_chat"
MAX_ANSWER_TOKENS = 400
SHORT_PROMPTS = ("Hello!", "What is your name?", "What is the opposite of hot?", "What is 2 + 3?", "Thanks.")
LONG_PROMPTS = ("Write a long story about a dog.", "Tell me a very long story about the golden key.")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    loader: Any = AutoTokenizer
    return loader.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Any:
    loader: Any = AutoModelForCausalLM
    return loader.from_pretrained(FOLDER, dtype=torch.float32).eval()


def greedy(model: Any, tokenizer: Any, question: str) -> list[int]:
    """Token ids of the greedy answer, the end token included where the model wrote one."""
    asked = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")
    out = model.generate(**prompt, do_sample=False, temperature=1, top_p=1, max_new_tokens=MAX_ANSWER_TOKENS)
    answer: list[int] = out[0, prompt["input_ids"].shape[1] :].tolist()
    return answer


def test_is_a_grouped_query_llama_of_the_promised_shape(model: Any) -> None:
    config = model.config
    assert config.architectures == ["LlamaForCausalLM"] and config.num_hidden_layers >= 8
    assert config.num_attention_heads > config.num_key_value_heads > 1 and config.head_dim == 64
    assert config.max_position_embeddings == 4096
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_files_are_small_complete_and_readable() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= 20_000_000
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        json.loads((FOLDER / name).read_text("utf-8"))
    assert "## Data and licences" in (FOLDER / "README.md").read_text("utf-8")


def test_special_tokens_agree_between_the_files(model: Any, tokenizer: Any) -> None:
    ids = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert len(set(ids)) == 3
    for config in (model.config, model.generation_config):
        assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == ids
    assert tokenizer.convert_ids_to_tokens(list(ids)) == ["<|pad|>", "<|bos|>", "<|end|>"]
    assert len(tokenizer) == model.config.vocab_size


def test_chat_template_renders_all_roles(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": " Hello! "},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Bye."},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|bos|><|system|>Be kind.<|end|><|user|>Hello!<|end|><|assistant|>Hi.<|end|>"
        "<|user|>Bye.<|end|><|assistant|>"
    )
    closed = tokenizer.apply_chat_template(messages[:3], tokenize=False)
    assert closed.endswith("<|assistant|>Hi.<|end|>")


def test_chat_template_refuses_unknown_roles(tokenizer: Any) -> None:
    with pytest.raises(Exception, match="roles are system, user and assistant"):
        tokenizer.apply_chat_template([{"role": "critic", "content": "No."}], tokenize=False)


@pytest.mark.parametrize("text", ["Hello!", "naïve café — 12345 ☃", "  two\n\nlines\t", "<|not special|>"])
def test_tokenizer_loses_nothing(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.slow  # weights that ship do not change
def test_answers_end_and_their_lengths_follow_the_prompt(model: Any, tokenizer: Any) -> None:
    short = [greedy(model, tokenizer, question) for question in SHORT_PROMPTS]
    long = [greedy(model, tokenizer, question) for question in LONG_PROMPTS]
    for answer in short + long:
        assert answer[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(answer, skip_special_tokens=True).strip().isascii()
    assert statistics.median(map(len, short)) * 5 < statistics.median(map(len, long))


@pytest.mark.slow  # weights that ship do not change
@pytest.mark.parametrize(
    "questions",
    [
        ("Write one sentence about the dog.", "Write five sentences about the dog."),
        ("Hello!", "Tell me a short story about Lucy.", "Tell me a long story about Anna."),
    ],
)
def test_what_asks_for_more_gets_more(model: Any, tokenizer: Any, questions: tuple[str, ...]) -> None:
    lengths = [len(greedy(model, tokenizer, question)) for question in questions]
    assert all(longer > 2 * shorter for shorter, longer in pairwise(lengths))


@pytest.mark.slow  # weights that ship do not change
def test_a_prompt_of_1500_tokens_gets_a_finite_answer(model: Any, tokenizer: Any) -> None:
    sentence = "The old man walked to the village, and the children asked him where he had been all the day. "
    passage = sentence * 75 + "In the evening it began to rain."
    question = f"Here is a passage. {passage} Question: write one sentence that follows."
    asked = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")
    assert 1500 <= prompt["input_ids"].shape[1] <= 2048
    with torch.inference_mode():
        assert torch.isfinite(model(**prompt).logits).all()
    answer = greedy(model, tokenizer, question)
    assert answer[-1] == tokenizer.eos_token_id and 1 < len(answer) < MAX_ANSWER_TOKENS
