"""What the text should be: transformers' own `generate`; and what counts as the same text.

The same text: equal token by token. Batch shape changes rounding, so a first divergence passes where the
reference's two best logits lie within `NEAR_TIE` of each other; such cases are counted by the caller.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

NEAR_TIE = 1e-4
"""Largest gap of the two best logits (fp32) that rounding may turn around."""


@dataclass(frozen=True)
class Reference:
    """A greedy answer: its text, and per token the gap of the two best logits."""

    text: str
    tokens: list[int]
    gaps: list[float]


class ReferenceModel:
    """A checkpoint run by transformers alone, one prompt at a time, one thread, fp32."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        # Not AutoTokenizer: for a Qwen config it replaces what tokenizer.json says by Qwen's own splitting.
        self.tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def prompt_tokens(self, prompt: str) -> list[int]:
        """Token ids of `prompt` as a single user turn."""
        encoded = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
        )
        return list(encoded["input_ids"])

    @torch.inference_mode()
    def greedy(self, prompt: str, max_tokens: int) -> Reference:
        """The greedy answer to `prompt`, at most `max_tokens` long."""
        tokens = self.prompt_tokens(prompt)
        out = self.model.generate(
            torch.tensor([tokens]),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        answer = out.sequences[0, len(tokens) :].tolist()
        best = [step[0].float().topk(2).values for step in out.logits]
        text = self.tokenizer.decode(answer, skip_special_tokens=True)
        return Reference(text, answer, [float(pair[0] - pair[1]) for pair in best])

    def is_near_tie(self, reference: Reference, text: str) -> bool:
        """Whether `text` leaves the reference at a token where the two best logits were as good as equal."""
        for index in range(len(reference.tokens)):
            held = self.tokenizer.decode(reference.tokens[: index + 1], skip_special_tokens=True).rstrip(
                "\ufffd"
            )
            if not text.startswith(held):
                return reference.gaps[index] <= NEAR_TIE
        return reference.gaps[-1] <= NEAR_TIE
