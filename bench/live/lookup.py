"""`python -m bench lookup`: what guessing tokens from the text so far brings (`worker.lookup_tokens`).

Two stacks answer the same chats in turns, one with guesses: questions, whose answers are new text, and
paragraphs to be written out again, whose answers are there already. 1, 2 and 4 chats at once; every answer
has to be the same on both.
"""

from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from random import Random

from bench.kit.context import Context
from bench.kit.load import first_error, run_batch
from bench.kit.models import TINY_CHAT, checkpoint
from bench.kit.outcome import Outcome
from bench.kit.provenance import ROOT
from bench.kit.stacks import Stack, start_stack
from bench.kit.stats import alternate, interval, median_of_ratios
from shared.errors import InternalError

AT_ONCE = (1, 2, 4)
TOKENS = 128
_DEADLINE_S = 240.0
_WORDS = range(40, 90)
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Why is the sky blue?",
    "Write a short story about a fox and a crow.",
    "How do I cook rice?",
    "Write a Python function that adds two numbers.",
    "What is the difference between a lake and a sea?",
    "Name five animals of the forest and what they eat.",
    "How does a bicycle stay upright?",
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--model", default=str(TINY_CHAT), help="folder or GGUF file [%(default)s]")
    parser.add_argument("--weights", default="auto", help="worker.weights [%(default)s]")
    parser.add_argument("--tokens", type=int, default=15, help="worker.lookup_tokens [%(default)s]")
    parser.add_argument("--turns", type=int, help="of both sides [9; --quick 2]")


def run(context: Context) -> Outcome:
    """Run the bench. Raises InternalError if an answer is missing."""
    flags, figures, notes, changed = context.arguments, dict[str, float](), list[str](), 0
    turns, model = flags.turns or (2 if context.quick else 9), checkpoint(flags.model)
    with ExitStack() as running:
        stacks: list[Stack] = []
        for name, tokens in (("plain", 0), ("guessing", flags.tokens)):
            settings = {"worker.lookup_tokens": tokens, "worker.weights": flags.weights}
            started = start_stack(context.run_dir / name, settings, name=name, model=model)
            stacks.append(running.enter_context(started))
        for name, make in (("questions", questions), ("copies", copies)):
            for at_once in AT_ONCE:
                draw = context.random(f"{name} {at_once}")
                rounds = [make(draw, at_once) for _ in range(turns + 1)]
                sides = [partial(_answered, stack, iter(rounds)) for stack in stacks]
                for side in sides:
                    side()
                plain, guessing = alternate(sides, turns)
                changed += sum(one != other for (_, one), (_, other) in zip(plain, guessing, strict=True))
                plain_s, guessing_s = ([took_s for took_s, _ in side] for side in (plain, guessing))
                ratio = figures[f"{name}_b{at_once}"] = median_of_ratios(plain_s, guessing_s)
                low, high = interval(plain_s, guessing_s, median_of_ratios)
                notes.append(
                    f"{name}, {at_once} at once: {ratio:.2f} times as fast ({low:.2f} to {high:.2f})"
                )
                context.record(
                    {"load": name, "at_once": at_once, "plain_s": plain_s, "guessing_s": guessing_s}
                )
        details = stacks[1].details("kept_guesses")
    kept, wrong = details["kept_guesses"], details["wrong_guesses"]
    figures |= {"kept_share": kept / max(1, kept + wrong), "changed": float(changed)}
    return Outcome(figures, changed, notes=notes)


def _answered(stack: Stack, rounds: Iterator[list[str]]) -> tuple[float, list[str]]:
    """Ask the next round's questions at once; return the time from the first text to the last, and answers.

    Raises InternalError if one is missing."""
    bodies = [
        {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS, "temperature": 0}
        for text in next(rounds)
    ]
    found = run_batch(replace(stack.target, path="/v1/chat/completions"), bodies, _DEADLINE_S)
    if first_error(found):
        raise InternalError(f"an answer is missing: {first_error(found)}")
    began_s = min(each.event_s[0] for each in found)
    return max(each.ended_s for each in found) - began_s, [each.text for each in found]


def questions(draw: Random, count: int) -> list[str]:
    return draw.sample(QUESTIONS, count)


def copies(draw: Random, count: int) -> list[str]:
    """Return requests to write out paragraphs of these pages' decisions."""
    texts = [path.read_text() for path in sorted((ROOT / "docs/decisions").glob("0*.md"))]
    found = [" ".join(part.replace("*", "").split()) for text in texts for part in text.split("\n\n")]
    usable = [part for part in found if len(part.split()) in _WORDS]
    return [f"Write out this text again, word for word:\n\n{part}" for part in draw.sample(usable, count)]
