"""`python -m bench settings KEY=VALUE …`: what settings bring, against the defaults or those of `--base`.

Two stacks answer the same chats in turns: questions, whose answers are new text, and paragraphs to be written
out again, whose answers are there already. `LOAD_bN` is the ratio of the times from the first text to the
last of N chats at once, `LOAD_first_bN` that of the mean times to the first text; above 1 the settings are
faster. `changed` counts turns with different answers.
"""

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from random import Random
from statistics import fmean, median
from typing import NamedTuple

from bench.kit.context import Context
from bench.kit.load import first_error, run_batch
from bench.kit.models import TINY_CHAT, checkpoint
from bench.kit.outcome import Outcome, Table
from bench.kit.provenance import ROOT
from bench.kit.stacks import Stack, start_stack
from bench.kit.stats import alternate, interval, median_of_ratios
from shared.errors import InternalError

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
    add = parser.add_argument
    add("settings", nargs="+", type=_setting, metavar="KEY=VALUE", help="of one side; stack.workers, too [1]")
    add("--base", nargs="*", type=_setting, default=[], metavar="KEY=VALUE", help="of the other [defaults]")
    add("--model", default=str(TINY_CHAT), help="folder or GGUF file [%(default)s]")
    add("--loads", nargs="+", choices=LOADS, default=list(LOADS), help="[both]")
    add("--at-once", nargs="+", type=int, default=[1, 2, 4], help="[1 2 4]")
    add("--turns", type=int, help="of both sides [9; --quick 2]")


def run(context: Context) -> Outcome:
    """Run the bench. Raises InternalError if an answer is missing."""
    flags, figures, rows, changed = context.arguments, dict[str, float](), list[Sequence[object]](), 0
    turns, model = flags.turns or (2 if context.quick else 9), checkpoint(flags.model)
    with ExitStack() as running:
        stacks: list[Stack] = []
        for name, pairs in (("base", flags.base), ("other", flags.settings)):
            settings = dict(pairs)
            workers = int(settings.pop("stack.workers", 1))
            started = start_stack(context.run_dir / name, settings, name=name, model=model, workers=workers)
            stacks.append(running.enter_context(started))
        for name, at_once in product(flags.loads, flags.at_once):
            draw = context.random(f"{name} {at_once}")
            rounds = [LOADS[name](draw, at_once) for _ in range(turns + 1)]
            sides = [partial(_answered, stack, iter(rounds)) for stack in stacks]
            for side in sides:
                side()
            base, other = alternate(sides, turns)
            changed += sum(one.texts != two.texts for one, two in zip(base, other, strict=True))
            said = []
            for part in ("", "first_"):
                base_s, other_s = ([getattr(each, f"{part}s") for each in side] for side in (base, other))
                ratio = figures[f"{name}_{part}b{at_once}"] = median_of_ratios(base_s, other_s)
                low, high = interval(base_s, other_s, median_of_ratios)
                said += [
                    f"{median(base_s):.2f} → {median(other_s):.2f}",
                    f"{ratio:.2f} ({low:.2f} to {high:.2f})",
                ]
                context.record(
                    {"load": name, "at_once": at_once, "what": f"{part}s", "base": base_s, "other": other_s}
                )
            rows.append((name, at_once, *said))
    columns = ("load", "at once", "s", "times as fast", "s to the first text", "times as fast")
    title = " ".join(f"{key}={value}" for key, value in flags.settings)
    return Outcome(figures | {"changed": float(changed)}, changed, [Table(title, columns, rows)])


class _Turn(NamedTuple):
    """One round of chats. Units: seconds."""

    s: float
    """From the first text to the last."""
    first_s: float
    """Mean from sending to the first text."""
    texts: list[str]


def _answered(stack: Stack, rounds: Iterator[list[str]]) -> _Turn:
    """Ask the next round's questions at once. Raises InternalError if an answer is missing."""
    bodies = [
        {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS, "temperature": 0}
        for text in next(rounds)
    ]
    found = run_batch(replace(stack.target, path="/v1/chat/completions"), bodies, _DEADLINE_S)
    if first_error(found):
        raise InternalError(f"an answer is missing: {first_error(found)}")
    began_s, ended_s = min(each.event_s[0] for each in found), max(each.ended_s for each in found)
    return _Turn(ended_s - began_s, fmean(each.first_s for each in found), [each.text for each in found])


def _setting(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator:
        raise ArgumentTypeError(f"{text} is not KEY=VALUE")
    return key, value


def questions(draw: Random, count: int) -> list[str]:
    """Return different requests: some ask for the answer in so many sentences."""
    asked = [*QUESTIONS, *(f"{text} Say it in {n} sentences." for n in range(2, 12) for text in QUESTIONS)]
    return draw.sample(asked[: max(count, len(QUESTIONS))], count)


def copies(draw: Random, count: int) -> list[str]:
    """Return requests to write out paragraphs of these pages' decisions."""
    texts = [path.read_text() for path in sorted((ROOT / "docs/decisions").glob("0*.md"))]
    found = [" ".join(part.replace("*", "").split()) for text in texts for part in text.split("\n\n")]
    usable = [part for part in found if len(part.split()) in _WORDS]
    return [f"Write out this text again, word for word:\n\n{part}" for part in draw.sample(usable, count)]


LOADS = {"questions": questions, "copies": copies}
