"""What a model that is held to a format writes is read back as valid calls, whichever format it is."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from services.gateway.parts.formats import (
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMED,
    CallFormat,
    Function,
    format_of,
)
from services.gateway.parts.items import AnswerMessage
from shared.grammars import Grammars, json_grammar, lark_grammar, words_of
from shared.tokenizer_files import TokenizerFiles, load_tokenizer

MODEL = Path(__file__).resolve().parents[4] / "models" / "tiny_chat"
FORMATS = [HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, HARMONY]
FORM = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
FUNCTIONS = [
    Function(
        "weather",
        "",
        {
            "type": "object",
            "$defs": {"unit": {"enum": ["C", "F"]}},
            "properties": {"city": {"enum": ["Paris", 'say "x"']}, "unit": {"$ref": "#/$defs/unit"}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    ),
    Function("now", "", {"type": "object", "additionalProperties": False}),
]


@cache
def vocabulary() -> tuple[TokenizerFiles, Grammars, dict[str, int]]:
    """tiny_chat's with the marks of every format as tokens, some of them special."""
    files = load_tokenizer(str(MODEL))
    marks = sorted({mark for kind in FORMATS for mark in kind.marks})
    for mark in marks:
        is_special = not mark.startswith(("<tool", "<think", "</"))
        files.tokenizer.add_tokens([AddedToken(mark, special=is_special, normalized=False)])
    size = files.tokenizer.get_vocab_size(with_added_tokens=True)
    added = {each.content: token for token, each in files.tokenizer.get_added_tokens_decoder().items()}
    return replace(files, vocab_size=size), Grammars(files, size), added


def written(grammar: str, seed: int) -> str:
    """A text of the grammar, drawn at random."""
    files, grammars, _ = vocabulary()
    matcher, numbers = grammars.compile(grammar), np.random.default_rng(seed)
    words = np.zeros(words_of(grammars.vocabulary), dtype=np.uint32)
    tokens: list[int] = []
    for _ in range(600):
        matcher.mask(words)
        ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        assert ids, matcher.error
        if 2 in ids and (len(ids) == 1 or numbers.random() < 0.5):
            return str(files.tokenizer.decode(tokens, skip_special_tokens=False))
        ids = [token for token in ids if token != 2]
        tokens.append(int(numbers.choice(ids)))
        assert matcher.accept(tokens[-1])
    raise AssertionError("it does not end")


def read(kind: CallFormat, text: str) -> AnswerMessage:
    reader, message = kind.reader(), AnswerMessage()
    for letter in text:
        message.add(reader.feed(letter))
    message.add(reader.end())
    return message


def check_calls(message: AnswerMessage) -> None:
    schemas = {function.name: function.parameters for function in FUNCTIONS}
    for call in message.calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32), most=st.integers(1, 3))
def test_calls_that_must_be_are_valid(kind: CallFormat, seed: int, most: int) -> None:
    text = written(kind.grammar(FUNCTIONS, vocabulary()[2], most_calls=most), seed)
    message = read(kind, text)
    assert 1 <= len(message.calls) <= most and not message.content, text
    check_calls(message)


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_calls_or_a_form(kind: CallFormat, seed: int) -> None:
    grammar = kind.grammar(FUNCTIONS, vocabulary()[2], form=json_grammar(FORM))
    message = read(kind, written(grammar, seed))
    check_calls(message)
    if not message.calls:
        jsonschema.validate(json.loads(message.content), FORM)


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_a_form_alone(kind: CallFormat) -> None:
    message = read(kind, written(kind.form(lark_grammar('start: "yes" | "no"'), vocabulary()[2]), 0))
    assert message.content in ("yes", "no") and not message.calls


def test_templates_show_the_format() -> None:
    assert format_of("{{ '<|start|>' }}<|channel|>final<|message|>") is HARMONY
    assert format_of("[AVAILABLE_TOOLS][TOOL_CALLS] [") is MISTRAL
    assert format_of("[TOOL_CALLS]{{ name }}[ARGS]") is MISTRAL_NAMED
    assert format_of("<|im_start|>…<tool_call>\n") is HERMES
    assert format_of("<|start_header_id|>ipython<|end_header_id|>") is LLAMA
    assert format_of("{{ messages }}") is HERMES
