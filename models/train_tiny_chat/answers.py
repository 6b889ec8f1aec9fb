"""Chats from published answers: AlpacaEval prompts (Mistral-7B-Instruct, Vicuna) and GSM8K (worked
solutions).

Does not know the tokenizer: lengths here are in characters.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from models.train_tiny_chat.chat import Chat, ask

ANSWER_FILES = (
    "Mistral-7B-Instruct-v0.2_model_outputs.json",
    "vicuna-7b-v1.5_model_outputs.json",
    "vicuna-13b-v1.5_model_outputs.json",
)
MAX_PROMPT_CHARS = 700
BRIEF = ("Answer briefly. {}", "{} Answer in one sentence.", "{} Keep it short.", "In one sentence: {}")
DETAILED = (
    "Answer in detail. {}",
    "{} Explain in detail.",
    "{} Give a long answer.",
    "{} Write as much as you can.",
)


def cut(text: str, max_chars: int) -> str:
    """The longest run of whole sentences or lines from the start that fits; at least the first sentence."""
    pieces = re.split(r"(?<=[.!?])(?=\s)|(?<=\n)(?=\n)", text.strip())
    kept = pieces[0]
    for piece in pieces[1:]:
        if len(kept) + len(piece) > max_chars:
            break
        kept += piece
    return re.sub(r"\s*(\n\s*)?(\d+\.|[-*])$", "", kept.strip()).strip()


def _is_english(text: str) -> bool:
    return text.isascii() and "```" not in text and "|" not in text


def alpaca_chats(folder: Path, rng: random.Random) -> Iterator[tuple[str, Chat]]:
    """(prompt, chat) pairs; a prompt occurs with several answers, brief and detailed."""
    for name in ANSWER_FILES:
        for row in json.loads((folder / "alpaca_eval" / name).read_text("utf-8")):
            prompt, answer = row["instruction"].strip(), row["output"].strip()
            if len(prompt) > MAX_PROMPT_CHARS or not _is_english(prompt + answer) or not answer:
                continue
            yield prompt, ask("open", prompt, cut(answer, int(min(1300, 120 * rng.paretovariate(0.75)))))
            yield prompt, ask("open_brief", rng.choice(BRIEF).format(prompt), cut(answer, 60))
            yield prompt, ask("open_detailed", rng.choice(DETAILED).format(prompt), cut(answer, 1350))


def gsm8k_chats(folder: Path, rng: random.Random) -> Iterator[tuple[str, Chat]]:
    """(question, chat) pairs: the number only, or the worked solution in sentences."""
    for line in (folder / "gsm8k" / "train.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        solution, number = re.sub(r"<<[^>]*>>", "", row["answer"]).split("####")
        question = row["question"].strip()
        short = f"The answer is {number.strip()}."
        if rng.random() < 0.35:
            yield question, ask("maths_short", f"{question} Answer with the number only.", short)
        else:
            yield question, ask("maths", question, " ".join(solution.split()) + " " + short)
