"""What a grammar lets follow, and which ones are refused with their reason."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.errors import ConfigError, InvalidRequest
from shared.grammars import (
    MOST_GRAMMAR_CHARS,
    GrammarMatcher,
    Grammars,
    json_grammar,
    lark_grammar,
    regex_grammar,
    words_of,
)
from shared.tokenizer_files import TokenizerFiles, load_tokenizer

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny_chat"


@pytest.fixture(scope="module")
def files() -> TokenizerFiles:
    return load_tokenizer(str(MODEL))


@pytest.fixture(scope="module")
def grammars(files: TokenizerFiles) -> Iterator[Grammars]:
    yield Grammars(files)


def following(grammars: Grammars, files: TokenizerFiles, matcher: GrammarMatcher) -> set[str]:
    words = np.zeros(words_of(grammars.vocabulary), dtype=np.uint32)
    matcher.mask(words)
    ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    return {str(files.tokenizer.id_to_token(int(token))) for token in ids}


def id_of(files: TokenizerFiles, text: str) -> int:
    token = files.tokenizer.token_to_id(text)
    assert token is not None
    return token


def test_what_may_follow(grammars: Grammars, files: TokenizerFiles) -> None:
    matcher = grammars.compile(regex_grammar("ab?"))
    assert following(grammars, files, matcher) == {"a", "ab"}
    assert matcher.accept(id_of(files, "a"))
    again = matcher.copy()
    assert following(grammars, files, matcher) == {"b", "<|end|>"}
    was_terminated = matcher.is_terminated
    assert matcher.accept(id_of(files, "b"))
    assert following(grammars, files, matcher) == {"<|end|>"}
    assert (was_terminated, matcher.is_terminated) == (False, True)
    assert not matcher.accept(id_of(files, "a"))
    assert following(grammars, files, matcher) == set() and matcher.error
    assert following(grammars, files, again) == {"b", "<|end|>"}, "a copy goes its own way"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "object", "not": {}}, "not"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"if": {}, "then": {"type": "string"}}, "then"),
    ({"type": "string", "format": "kazoo"}, "kazoo"),
    ({"type": "strin"}, "strin"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    ({"type": "string", "pattern": "(?=a)"}, "look-around"),
    ({"$ref": "http://127.0.0.1:1/elsewhere"}, "not present"),
    ({"type": "object", "not": {}, "x-guidance": {"lenient": True}}, "not"),
    ({"type": "object", "properties": {f"p{at}": {} for at in range(5000)}}, "items"),
    ({"type": "integer", "multipleOf": 9973, "maximum": 2**53}, "too many"),
]


@pytest.mark.parametrize(("schema", "said"), REFUSED)
def test_schemas_that_are_refused(grammars: Grammars, schema: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        grammars.check(json_grammar(schema))


@pytest.mark.parametrize("grammar", [regex_grammar("(a"), lark_grammar("start: b"), "x" * 10])
def test_grammars_that_are_refused(grammars: Grammars, grammar: str) -> None:
    with pytest.raises(InvalidRequest):
        grammars.check(grammar)


def test_what_takes_too_long_to_follow_is_refused(grammars: Grammars) -> None:
    with pytest.raises(InvalidRequest):
        grammars.check(regex_grammar("(a{1000}){1000}"))
    with pytest.raises(InvalidRequest, match=str(MOST_GRAMMAR_CHARS)):
        grammars.check(lark_grammar('start: "' + "a" * MOST_GRAMMAR_CHARS + '"'))


def test_json_stays_on_one_line(grammars: Grammars, files: TokenizerFiles) -> None:
    grammar = json_grammar({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    for text, is_taken in (
        ('{"a": 1}', True),
        ('{"a":1}', True),
        ('{"a"  : 1}', False),
        ('{\n"a":1}', False),
    ):
        matcher = grammars.compile(grammar)
        tokens = files.tokenizer.encode(text, add_special_tokens=False).ids
        assert all(matcher.accept(token) for token in tokens) is is_taken, text
        assert json.loads(text) == {"a": 1}


def test_a_model_without_an_end_token_has_none(files: TokenizerFiles) -> None:
    without = TokenizerFiles(files.folder, files.tokenizer, {}, {}, (), files.vocab_size)
    with pytest.raises(ConfigError, match="end token"):
        Grammars(without)
