"""Batched generation with transformers on the exported folder, for evaluation and for `endings`.

Knows nothing about training; a slow stand-in for the worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH_ROWS = 48
BATCH_PROMPT_TOKENS = 24_000


@dataclass(frozen=True)
class Answer:
    """Generated token ids without the end token; `ended` tells whether the model wrote one."""

    prompt: str
    tokens: list[int]
    text: str
    ended: bool

    def length_tokens(self) -> int:
        """Tokens generated, end token included."""
        return len(self.tokens) + self.ended


class Generator:
    """The exported model, in float32, and its tokenizer."""

    def __init__(self, folder: Path) -> None:
        loader: Any = AutoTokenizer
        self.tokenizer: Any = loader.from_pretrained(folder, padding_side="left")
        loader = AutoModelForCausalLM
        self.model: Any = loader.from_pretrained(folder, dtype=torch.float32)
        self.model.eval()

    def answer(
        self, prompts: list[str], temperature: float, max_tokens: int = 400, seed: int = 0
    ) -> list[Answer]:
        """Answers in the order of the rendered prompts; greedy where the temperature is 0."""
        sizes = [len(self.tokenizer.encode(p, add_special_tokens=False)) for p in prompts]
        order = sorted(range(len(prompts)), key=sizes.__getitem__)
        answers: dict[int, Answer] = {}
        torch.manual_seed(seed)
        while order:
            longest = sizes[order[min(BATCH_ROWS, len(order)) - 1]]
            rows = max(1, min(BATCH_ROWS, BATCH_PROMPT_TOKENS // longest))
            batch, order = order[:rows], order[rows:]
            made = self._batch([prompts[i] for i in batch], temperature, max_tokens)
            answers.update(zip(batch, made, strict=True))
        return [answers[i] for i in range(len(prompts))]

    @torch.inference_mode()
    def _batch(self, prompts: list[str], temperature: float, max_tokens: int) -> list[Answer]:
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        sampling = (
            {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0} if temperature else {}
        )
        out = self.model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_tokens,
            **(sampling or {"do_sample": False, "temperature": 1.0, "top_p": 1.0}),
        )
        end = self.tokenizer.eos_token_id
        answers = []
        for prompt, row in zip(prompts, out[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            ended = end in row
            tokens = row[: row.index(end)] if ended else row
            answers.append(Answer(prompt, tokens, self.tokenizer.decode(tokens), ended))
        return answers
