"""The bench of structured output: what it draws is a schema, what it finds wrong is wrong."""

import random

import jsonschema
import pytest

from bench.kit.load import Answer
from bench.live.structured import fault_of, random_schema
from shared.grammars import Grammars, json_grammar
from shared.tokenizer_files import load_tokenizer


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(load_tokenizer("models/tiny_chat"))


def test_what_is_drawn_can_be_answered(grammars: Grammars) -> None:
    draw = random.Random(7)
    for _ in range(100):
        schema = random_schema(draw, depth=2)
        jsonschema.Draft202012Validator.check_schema(schema)
        grammars.check(json_grammar(schema))


def test_faults() -> None:
    schema = {"type": "integer"}
    assert fault_of(Answer(0.0, pieces=["12"]), schema) == ""
    assert fault_of(Answer(0.0, pieces=["1", "x"], finish_reason="length"), schema).startswith("length")
    assert fault_of(Answer(0.0, pieces=['"a"']), schema)
    assert fault_of(Answer(0.0, pieces=["2.0"]), schema) == ""
    assert fault_of(Answer(0.0, pieces=["9.7305"]), {"multipleOf": 0.0001}) == ""
    assert fault_of(Answer(0.0, pieces=["9.73055"]), {"multipleOf": 0.0001})
    assert fault_of(Answer(0.0, error="connection lost"), schema) == "connection lost"
