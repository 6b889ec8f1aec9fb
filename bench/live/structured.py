"""`python -m bench structured`: cost and validity of answers constrained to a JSON schema.

Constrained and free answers of the same length take turns on one stack, 1, 8 and 32 at once. The added time
to the first token is measured with a new schema each time. Answers to random schemas are validated.
"""

import json
import random
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.kit.context import Context
from bench.kit.load import Answer, check, first_error, full_answer, run_batch
from bench.kit.models import TINY_CHAT, checkpoint, drawn_tokens, vocabulary
from bench.kit.outcome import Outcome
from bench.kit.stacks import PLAIN, Stack, start_stack
from bench.kit.stats import alternate, median_of_ratios
from shared.errors import InternalError

BATCHES = (1, 8, 32)
TOKENS = 96
"""Answer tokens where throughput is measured."""
PROMPT_TOKENS = 200
"""Prompt tokens where TTFT is measured: the schema compiles during their prefill."""
ANSWER_TOKENS = 160
"""Answer limit where answers are validated."""
_DEADLINE_S = 240.0
_AT_ONCE = 32
_ITEM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"enum": ["glad", "sad", "calm"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "mood", "tags"],
    "additionalProperties": False,
}
ENDLESS: dict[str, Any] = {"type": "array", "items": _ITEM, "minItems": 10_000}
"""Schema whose answers never end before their limit, so they are as long as free ones."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, help="of both sides [9; --quick 3]")
    parser.add_argument("--model", default=str(TINY_CHAT), help="a folder, or random-50m, random-100m")
    parser.add_argument("--schemas", type=int, help="random ones [1000; --quick 64]")


def run(context: Context) -> Outcome:
    """Run the bench. Raises InternalError if an answer is missing."""
    flags = context.arguments
    turns = flags.turns or (3 if context.quick else 9)
    count = flags.schemas or (64 if context.quick else 1000)
    draw = context.random("schemas")
    drawn = [random_schema(draw, depth=2) for _ in range(count)]
    model = _model(context)
    settings = {**PLAIN, "scheduler.policy": "kvasir"}
    with start_stack(context.run_dir / "stack", settings, model=model) as stack:
        figures: dict[str, float] = {}
        for batch in BATCHES:
            figures[f"constrained_ratio_b{batch}"] = ratio_of(context, stack, batch, turns)
        figures["added_ttft_ms"] = added_ttft_ms(context, stack, 3 * turns)
        faults = validated(context, stack, drawn)
    valid = faults.count("")
    figures["valid_share"] = valid / count
    notes = [
        f"{TOKENS} tokens an answer in ratios; rates of constrained over free, median of {turns} turns",
        f"{valid} of {count} answers to random schemas are valid",
    ]
    return Outcome(figures, count - valid, notes=notes)


def _model(context: Context) -> Path:
    return checkpoint(context.arguments.model)


def ratio_of(context: Context, stack: Stack, batch: int, turns: int) -> float:
    """Return the ratio of constrained to free tokens per second."""
    dice, ids = context.random("prompts"), vocabulary(_model(context))
    prompts = [drawn_tokens(dice, ids, 24) for _ in range(batch)]
    free = [full_answer(prompt, TOKENS) for prompt in prompts]
    held = [{**body, "guided_json": ENDLESS, "ignore_eos": False} for body in free]
    sides: list[Callable[[], float]] = [partial(_took_s, stack, held), partial(_took_s, stack, free)]
    for side in sides:
        side()
    held_s, free_s = alternate(sides, turns)
    context.record({"batch": batch, "held_s": held_s, "free_s": free_s})
    return median_of_ratios(free_s, held_s)


def _took_s(stack: Stack, bodies: Sequence[dict[str, Any]]) -> float:
    """Return the time from the first text of any answer to the end of the last."""
    answers = run_batch(stack.target, bodies, _DEADLINE_S)
    if check(answers, TOKENS):
        raise InternalError(f"an answer is missing: {first_error(answers)}")
    return max(answer.ended_s for answer in answers) - min(answer.event_s[0] for answer in answers)


def added_ttft_ms(context: Context, stack: Stack, turns: int) -> float:
    """Return the TTFT that a new schema of 2 kB adds."""
    serial, dice, ids = iter(range(10**9)), context.random("first"), vocabulary(_model(context))

    def first_s(held: bool) -> float:
        number = next(serial)
        body = full_answer(drawn_tokens(dice, ids, PROMPT_TOKENS), 8)
        if held:
            body |= {"guided_json": long_schema(number), "ignore_eos": False}
        (answer,) = run_batch(stack.target, [body], _DEADLINE_S)
        if not answer.ok:
            raise InternalError(f"an answer is missing: {answer.error}")
        return answer.first_s

    held_s, free_s = alternate([lambda: first_s(True), lambda: first_s(False)], turns)
    context.record({"held_first_s": held_s, "free_first_s": free_s})
    return 1e3 * (median(held_s) - median(free_s))


def long_schema(number: int) -> dict[str, Any]:
    """Return a unique schema of about 2 kB."""
    parts: list[dict[str, Any]] = [
        {"enum": [f"value {number} {at}" for at in range(4)]},
        {"type": "array", "items": _ITEM, "maxItems": 4},
        {"type": "number", "minimum": -5},
        {"type": "string", "pattern": "^[a-z]{2,9}$"},
    ]
    properties = {f"field_{number}_{at}": parts[at % len(parts)] for at in range(12)}
    return {"type": "object", "properties": properties, "required": list(properties)}


def validated(context: Context, stack: Stack, schemas: Sequence[dict[str, Any]]) -> list[str]:
    """Return the fault of an answer to each schema (`fault_of`)."""
    bodies = [
        {"prompt": "Write JSON.", "max_tokens": ANSWER_TOKENS, "seed": at, "guided_json": schema}
        for at, schema in enumerate(schemas)
    ]
    told: list[str] = []
    with context.progress("schemas", len(schemas)) as progress:
        for first in range(0, len(bodies), _AT_ONCE):
            answers = run_batch(stack.target, bodies[first : first + _AT_ONCE], _DEADLINE_S)
            for answer, schema in zip(answers, schemas[first:], strict=False):
                fault = fault_of(answer, schema)
                told.append(fault)
                if fault:
                    context.record({"schema": schema, "text": answer.text, "fault": fault}, "faults.jsonl")
            progress.advance(len(answers))
    return told


def fault_of(answer: Answer, schema: dict[str, Any]) -> str:
    """Return the fault of an answer; empty if it is valid."""
    if answer.error:
        return answer.error
    import jsonschema  # tests have it; a bench that is only listed does without

    found = ""
    for number in (float, Decimal):  # 9.7305 is a multiple of 0.0001 only in decimal arithmetic
        try:
            exact = json.loads(json.dumps(schema), parse_float=number)
            jsonschema.Draft202012Validator(exact).validate(json.loads(answer.text, parse_float=number))
        except (ValueError, jsonschema.ValidationError) as error:
            found = found or f"{answer.finish_reason}: {str(error).splitlines()[0]}"
        else:
            return ""
    return found


def random_schema(draw: random.Random, depth: int) -> dict[str, Any]:
    """Return a random schema of common kinds: objects with optional parts, lists, choices, scalars."""
    kind = draw.choice(
        tuple(SCALARS) if depth == 0 else (*SCALARS, "object", "object", "object", "array", "anyOf")
    )
    if kind == "object":
        names = draw.sample(("name", "age", "city", "tags", "kind", "parent", "ok"), draw.randint(1, 4))
        properties = {name: random_schema(draw, depth - 1) for name in names}
        required = [name for name in names if draw.random() < 0.7]
        found: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
        return found if draw.random() < 0.3 else {**found, "additionalProperties": False}
    if kind == "array":
        items = random_schema(draw, depth - 1)
        return {
            "type": "array",
            "items": items,
            "minItems": draw.randint(0, 2),
            "maxItems": draw.randint(2, 4),
        }
    if kind == "anyOf":
        return {"anyOf": [random_schema(draw, depth - 1) for _ in range(draw.randint(2, 3))]}
    return dict(draw.choice(SCALARS[kind]))


SCALARS: dict[str, list[dict[str, Any]]] = {
    "string": [
        {"type": "string"},
        {"type": "string", "maxLength": 12},
        {"type": "string", "minLength": 3, "maxLength": 5},
        {"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"},
        {"type": "string", "format": "date"},
        {"type": "string", "format": "uuid"},
    ],
    "number": [
        {"type": "integer"},
        {"type": "integer", "minimum": 3, "exclusiveMaximum": 70},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    ],
    "choice": [{"enum": ["red", "green", 3, None]}, {"const": "only"}, {"type": ["string", "null"]}],
    "other": [{"type": "boolean"}, {"type": "null"}],
}
