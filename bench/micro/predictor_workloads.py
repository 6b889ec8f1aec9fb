"""What the predictor bench trains and tests on: prompts as token ids, and how long the answers were.

Vicuna's lengths at T=0 for Alpaca prompts, where that data is; a file of one's own; answers that the shipped
model writes now; exercises made by templates, with the length of their model answers. Knows no predictor.
"""

import csv
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from bench.kit.models import TINY_CHAT
from models.train_tiny_chat.chat import END, data_folder
from models.train_tiny_chat.templates import template_chat
from services.predictor.core.length_model import LengthSample
from services.predictor.samples import load_tokenizer, read_samples
from shared.errors import ConfigError
from shared.messages.sequence import pack_tokens

_PROMPTS = Path("alpaca/alpaca_52002.jsonl")
_LENGTHS = Path("alpaca/alpaca_vicuna7b_response_lengths_20k.csv")


@dataclass(frozen=True)
class Workload:
    """The first samples train, the rest tests."""

    name: str
    train: Sequence[LengthSample]
    test: Sequence[LengthSample]


def tokenizer() -> Tokenizer:
    """Of the model that ships."""
    return load_tokenizer(TINY_CHAT)


def has_alpaca() -> bool:
    return (data_folder() / _PROMPTS).exists() and (data_folder() / _LENGTHS).exists()


def alpaca(train: int = 10_000, test: int = 10_000) -> Workload:
    """Vicuna-7B's lengths at T=0 in the order of the file; those at its cap of 512 count as they are."""
    prompts: dict[str, str] = {}
    with (data_folder() / _PROMPTS).open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            text = row["instruction"]
            prompts[str(row["id"])] = f"{text}\n{row['input']}" if row.get("input") else text
    with (data_folder() / _LENGTHS).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    chosen = [*rows[:train], *rows[10_000 : 10_000 + test]]
    encoded = tokenizer().encode_batch([prompts[row["id"]] for row in chosen], add_special_tokens=False)
    samples = [
        LengthSample(pack_tokens(one.ids), max(1, int(float(row["L_t0.0"]))), censored=False)
        for one, row in zip(encoded, chosen, strict=True)
    ]
    cut = len(rows[:train])
    return Workload("vicuna", samples[:cut], samples[cut:])


def from_file(path: Path, train_share: float = 0.5) -> Workload:
    """JSONL as `services/predictor/samples.py` reads it; the first half trains."""
    samples = read_samples(path, tokenizer())
    cut = int(len(samples) * train_share)
    if cut < 100:
        raise ConfigError(f"{path.name} has {len(samples)} rows; at least 200 are needed", param="trace")
    return Workload(path.stem, samples[:cut], samples[cut:])


def templates(rng: random.Random, train: int, test: int) -> Workload:
    """Exercises of the shipped model's training, drawn anew: the answer's length follows from the request."""
    encoder = tokenizer()
    samples = []
    for _ in range(train + test):
        chat = template_chat(rng)
        prompt, answer = chat.prompt(), chat.turns[-1][1].strip() + END
        length = len(encoder.encode(answer, add_special_tokens=False).ids)
        samples.append(LengthSample(_packed(encoder, prompt), length, censored=False))
    return Workload("templates", samples[:train], samples[train:])


def tiny_chat(
    rng: random.Random, train: int, test: int, *, max_tokens: int = 200, batch: int = 48
) -> Iterator[tuple[int, Workload | None]]:
    """Greedy answers that the shipped model writes to template exercises; (answers done, None) until it has
    all."""
    from models.train_tiny_chat.generation import Generator

    generator = Generator(TINY_CHAT)
    encoder = tokenizer()
    prompts = [template_chat(rng).prompt() for _ in range(train + test)]
    samples: list[LengthSample] = []
    for start in range(0, len(prompts), batch):
        for answer in generator.answer(prompts[start : start + batch], 0.0, max_tokens):
            prompt = _packed(encoder, answer.prompt)
            samples.append(LengthSample(prompt, max(1, answer.length_tokens()), not answer.ended))
        yield len(samples), None
    yield len(samples), Workload("tiny_chat", samples[:train], samples[train:])


def _packed(encoder: Tokenizer, text: str) -> bytes:
    return pack_tokens(encoder.encode(text, add_special_tokens=False).ids)
