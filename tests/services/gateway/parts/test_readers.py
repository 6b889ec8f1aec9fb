"""Answers in the formats of several models, taken apart the same however their text is cut."""

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
from services.gateway.parts.items import AnswerMessage, CallArguments, CallBegun, PartReader, ToolCallItem
from services.gateway.parts.readers import HarmonyReader, PlainReader, ThinkingReader
from shared.grammars import Grammars, json_grammar, lark_grammar, words_of
from shared.tokenizer_files import TokenizerFiles, load_tokenizer
from tests.conformance.schemas import closed

PARIS = '{"city": "Paris \\"{[<tool_call>\\", \\u00e9", "days": [1, {"a": {}}]}'
CASES: list[tuple[CallFormat, str, AnswerMessage]] = [
    (HERMES, "Hello there!\n", AnswerMessage("Hello there!")),
    (HERMES, "a < b, <tool", AnswerMessage("a < b, <tool")),
    (
        HERMES,
        f'One moment.\n<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {}, "name": "time"}\n</tool_call>',
        AnswerMessage("One moment.", "", [ToolCallItem("weather", PARIS), ToolCallItem("time", "{}")]),
    ),
    (
        HERMES,
        '<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}',
        AnswerMessage("", "", [ToolCallItem("f", '{"a": 1}')]),
    ),
    (HERMES, "<tool_call>\nno object", AnswerMessage("<tool_call>no object")),
    (HERMES, '<tool_call>{"nom": "f"}</tool_call>', AnswerMessage('<tool_call>{"nom": "f"}</tool_call>')),
    (
        LLAMA,
        f'{{"name": "weather", "parameters": {PARIS}}}',
        AnswerMessage("", "", [ToolCallItem("weather", PARIS)]),
    ),
    (
        LLAMA,
        '<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"x": 1}}',
        AnswerMessage("", "", [ToolCallItem("a", "{}"), ToolCallItem("b", '{"x": 1}')]),
    ),
    (LLAMA, '{"city": "Paris"}', AnswerMessage('{"city": "Paris"}')),
    (LLAMA, "It is {sunny}.", AnswerMessage("It is {sunny}.")),
    (
        MISTRAL,
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}}}, {{"name": "b", "arguments": {{}}}}]',
        AnswerMessage("", "", [ToolCallItem("weather", PARIS), ToolCallItem("b", "{}")]),
    ),
    (MISTRAL, "A list: [1, 2]", AnswerMessage("A list: [1, 2]")),
    (
        MISTRAL_NAMED,
        f"Look:[TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]b[ARGS]{{}}",
        AnswerMessage("Look:", "", [ToolCallItem("weather", PARIS), ToolCallItem("b", "{}")]),
    ),
    (
        HARMONY,
        "<|channel|>analysis<|message|>Hm, so.<|end|><|start|>assistant"
        "<|channel|>final<|message|>Yes.<|return|>",
        AnswerMessage("Yes.", "Hm, so."),
    ),
    (
        HARMONY,
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.weather <|constrain|>json<|message|>{PARIS}<|call|>",
        AnswerMessage("", "Look.", [ToolCallItem("weather", PARIS)]),
    ),
]


def read(reader: PartReader, pieces: list[str]) -> AnswerMessage:
    message, begun = AnswerMessage(), 0
    parts = [part for piece in pieces for part in reader.feed(piece)] + reader.end()
    for part in parts:
        if isinstance(part, CallBegun):
            assert part.index == begun
            begun += 1
        if isinstance(part, CallArguments):
            assert part.index == begun - 1 and part.text
    message.add(parts)
    return message


@st.composite
def cut(draw: st.DrawFn, text: str) -> list[str]:
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("case", range(len(CASES)))
@given(data=st.data())
def test_however_it_is_cut(case: int, data: st.DataObject) -> None:
    kind, text, expected = CASES[case]
    found = read(kind.reader(), data.draw(cut(text)))
    assert found == expected
    for call in found.calls:
        json.loads(call.arguments)


def test_arguments_come_as_they_are_written() -> None:
    reader = HERMES.reader()
    pieces = ('<tool_call>\n{"name": "f", "arguments": {"te', 'xt": "ab', 'c"}}\n</tool_call>')
    assert [reader.feed(piece) for piece in pieces] == [
        [CallBegun(0, "f"), CallArguments(0, '{"te')],
        [CallArguments(0, 'xt": "ab')],
        [CallArguments(0, 'c"}')],
    ]


THOUGHTS = [
    ("<think>\nHm.\n\nSo.\n</think>\n\nYes.\n", False, AnswerMessage("Yes.\n", "Hm.\n\nSo.")),
    ("Hm.\n</think>Yes.", True, AnswerMessage("Yes.", "Hm.")),
    ("Never ends", True, AnswerMessage("", "Never ends")),
    ("No thought.", False, AnswerMessage("No thought.")),
    ("<thin", False, AnswerMessage("<thin")),
    ("<think></think>x", False, AnswerMessage("x")),
]


@pytest.mark.parametrize(("text", "is_open", "expected"), THOUGHTS)
@given(data=st.data())
def test_thoughts_are_apart(text: str, is_open: bool, expected: AnswerMessage, data: st.DataObject) -> None:
    pieces = data.draw(cut(text))
    assert read(ThinkingReader(PlainReader(), is_open=is_open), pieces) == expected


def test_calls_after_thoughts() -> None:
    text = '<think>x</think>\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    found = read(ThinkingReader(HERMES.reader(), is_open=False), list(text))
    assert found == AnswerMessage("", "x", [ToolCallItem("f", "{}")])


@pytest.mark.parametrize("case", [at for at, (_, _, found) in enumerate(CASES) if found.calls])
@pytest.mark.parametrize("thinks", [False, True])
def test_of_an_answer_that_was_cut_no_part_of_a_mark_is_shown(case: int, thinks: bool) -> None:
    """`max_tokens` in the middle of `<tool_call>` left `<tool_c` in the content."""
    kind, text, expected = CASES[case]
    for end in range(len(text) + 1):
        reader, found = kind.reader(), AnswerMessage()
        if thinks:
            reader = ThinkingReader(reader, is_open=False)
        found.add([*reader.feed(text[:end]), *reader.end(is_cut=True)])
        assert expected.content.startswith(found.content) and expected.reasoning.startswith(found.reasoning)
        for call, whole in zip(found.calls, expected.calls, strict=False):
            assert call.name == whole.name and whole.arguments.startswith(call.arguments)


@pytest.mark.parametrize(
    ("reader", "text", "expected"),
    [
        (ThinkingReader(PlainReader(), is_open=True), "Hm.</thi", AnswerMessage("", "Hm.")),
        (ThinkingReader(PlainReader(), is_open=False), "<thi", AnswerMessage()),
        (HARMONY.reader(), "<|channel|>final<|message|>Yes.<|retu", AnswerMessage("Yes.")),
        (LLAMA.reader(), '{"city": "Pa', AnswerMessage('{"city": "Pa')),
    ],
)
def test_a_thought_or_a_form_that_is_cut(reader: PartReader, text: str, expected: AnswerMessage) -> None:
    """A bare object in which no call begins is an answer in JSON: it is shown as far as it came."""
    found = AnswerMessage()
    found.add([*reader.feed(text), *reader.end(is_cut=True)])
    assert found == expected


def test_an_answer_in_channels_that_is_continued() -> None:
    reader = HarmonyReader("<|start|>assistant<|channel|>final<|message|>The sky <")
    assert read(reader, [" is blue", "<|return|>"]) == AnswerMessage(" is blue")


def test_what_follows_a_broken_object_is_said() -> None:
    assert read(LLAMA.reader(), [" {:]::"]).content == " {:]::"


@given(st.text(alphabet='<tool_cal>{}":, \n[]ab\\', max_size=60), st.data())
def test_nothing_breaks_a_reader(text: str, data: st.DataObject) -> None:
    for kind in (HERMES, LLAMA, MISTRAL, MISTRAL_NAMED):
        whole = read(kind.reader(), [text])
        assert read(kind.reader(), data.draw(cut(text))) == whole


MODEL = Path(__file__).resolve().parents[4] / "models" / "tiny_chat"
FORMATS = [HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, HARMONY]
FORM = closed(a={"type": "boolean"})
_CITY = closed(city={"enum": ["Paris", 'say "x"']}, unit={"$ref": "#/$defs/unit"})
FUNCTIONS = [
    Function("weather", "", {**_CITY, "$defs": {"unit": {"enum": ["C", "F"]}}}),
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


def check_calls(message: AnswerMessage) -> None:
    schemas = {function.name: function.parameters for function in FUNCTIONS}
    for call in message.calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32), most=st.integers(1, 3))
def test_calls_that_must_be_are_valid(kind: CallFormat, seed: int, most: int) -> None:
    text = written(kind.grammar(FUNCTIONS, vocabulary()[2], most_calls=most), seed)
    message = read(kind.reader(), list(text))
    assert 1 <= len(message.calls) <= most and not message.content, text
    check_calls(message)


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32))
def test_calls_or_a_form(kind: CallFormat, seed: int) -> None:
    grammar = kind.grammar(FUNCTIONS, vocabulary()[2], form=json_grammar(FORM))
    message = read(kind.reader(), list(written(grammar, seed)))
    check_calls(message)
    if not message.calls:
        jsonschema.validate(json.loads(message.content), FORM)


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_a_form_alone(kind: CallFormat) -> None:
    text = written(kind.form(lark_grammar('start: "yes" | "no"'), vocabulary()[2]), 0)
    message = read(kind.reader(), list(text))
    assert message.content in ("yes", "no") and not message.calls


def test_templates_show_the_format() -> None:
    assert format_of("{{ '<|start|>' }}<|channel|>final<|message|>") is HARMONY
    assert format_of("[AVAILABLE_TOOLS][TOOL_CALLS] [") is MISTRAL
    assert format_of("[TOOL_CALLS]{{ name }}[ARGS]") is MISTRAL_NAMED
    assert format_of("<|im_start|>…<tool_call>\n") is HERMES
    assert format_of("<|start_header_id|>ipython<|end_header_id|>") is LLAMA
    assert format_of("{{ messages }}") is HERMES
