"""Measures the exported folder on held-out prompts: share of answers that end, lengths by kind, sample texts.

`python -m models.train_tiny_chat.evaluate --out models/tiny_chat` prints markdown tables for the model card.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from pathlib import Path

import torch

from models.train_tiny_chat.chat import Chat, data_folder
from models.train_tiny_chat.corpus import build_corpus
from models.train_tiny_chat.endings import loop_start
from models.train_tiny_chat.generation import Answer, Generator

PER_KIND, MAX_TOKENS = 14, 400


def percentile(values: list[int], share: float) -> int:
    """Nearest-rank percentile of non-empty values, `share` from 0 to 1."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


def row(name: str, answers: list[Answer]) -> str:
    """One markdown line: count, share that ends, share with a loop, length percentiles in tokens."""
    lengths = [a.length_tokens() for a in answers]
    ended = sum(a.ended for a in answers) / len(answers)
    looped = sum(loop_start(a.tokens) is not None for a in answers) / len(answers)
    marks = " | ".join(str(percentile(lengths, share)) for share in (0.1, 0.5, 0.9, 0.99))
    return f"| {name} | {len(answers)} | {100 * ended:.1f} % | {100 * looped:.1f} % | {marks} |"


def pick(chats: list[Chat], per_kind: int) -> list[Chat]:
    """Up to `per_kind` chats of each kind."""
    kinds: dict[str, list[Chat]] = defaultdict(list)
    for chat in chats:
        kinds[chat.kind].append(chat)
    return [chat for kind in sorted(kinds) for chat in kinds[kind][:per_kind]]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("models/tiny_chat"))
    parser.add_argument("--per-kind", type=int, default=PER_KIND)
    parser.add_argument("--samples", type=int, default=2, help="texts printed for each kind")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument(
        "--seed", type=int, default=0, help="the seed of the training, which fixes what is held out"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    _, held = build_corpus(data_folder(), args.seed)
    chats = pick(held.chats, args.per_kind)
    generator = Generator(args.out)
    for temperature in args.temperature:
        answers = generator.answer([chat.prompt() for chat in chats], temperature, MAX_TOKENS)
        print(f"\nTemperature {temperature}, held-out prompts, at most {MAX_TOKENS} tokens\n")
        print(
            "| kind | prompts | ends by itself | repeats itself | p10 | p50 | p90 | p99 |\n"
            "|---|---|---|---|---|---|---|---|"
        )
        print(row("all", answers))
        by_kind: dict[str, list[Answer]] = defaultdict(list)
        for chat, answer in zip(chats, answers, strict=True):
            by_kind[chat.kind].append(answer)
        for kind, group in by_kind.items():
            print(row(kind, group))
        for kind, group in by_kind.items():
            for answer in group[: args.samples]:
                print(f"\n[{kind}] ...{answer.prompt[-300:]}\n  -> {answer.text}")


if __name__ == "__main__":
    main()
