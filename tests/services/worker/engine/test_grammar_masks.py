"""Constrained rows: masks that depend on tokens alone, in C++ as in torch, and answers that end in time."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from time import thread_time
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.core.sampling import SamplePoint
from services.worker.engine.closing import Closer
from services.worker.engine.grammar_masks import GrammarMasks
from services.worker.engine.native.library import choose
from services.worker.engine.sampler import likeliest, mask_rows
from shared.grammars import GrammarMatcher, Grammars, json_grammar, lark_grammar, regex_grammar, words_of
from shared.messages.sequence import Sampling
from shared.tokenizer_files import TokenizerFiles, load_tokenizer
from tests.patience import STACK_PATIENCE_S, wait_until

MODEL = Path(__file__).resolve().parents[4] / "models" / "tiny_chat"
PROMPT = [1, 4, 90]


def closed(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with exactly these properties."""
    kinds = {"type": "object", "properties": properties, "required": [*properties]}
    return kinds | {"additionalProperties": False}


FRIEND = closed(name={"type": "string", "minLength": 3}, pet={"type": "boolean"})
PERSON = closed(
    name={"type": "string"},
    age={"type": "integer", "minimum": 0, "maximum": 150},
    mood={"enum": ["glad", "sad"]},
    friends={"type": "array", "items": FRIEND},
)
NODE = closed(value={"type": "number"}, next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]})
TREE = {"$defs": {"node": NODE}, "$ref": "#/$defs/node"}
WITHIN = closed(value={"type": "number"}, name={"pattern": "e+"})
"""A string that may end only after a letter that is not there yet; numbers beside it were cut off, too."""
SCHEMAS: list[dict[str, Any]] = [PERSON, TREE, WITHIN]
SCHEMAS += [{"type": kind} for kind in ("object", "array", "string")]


@pytest.fixture(scope="module")
def files() -> TokenizerFiles:
    return load_tokenizer(str(MODEL))


@pytest.fixture(scope="module")
def masks(files: TokenizerFiles) -> Iterator[GrammarMasks]:
    made = GrammarMasks(lambda: Grammars(files))
    yield made
    made.close()


def point_of(grammar: str, tokens: list[int], max_tokens: int = 200) -> SamplePoint:
    sampling = Sampling(seed=0, max_tokens=max_tokens, grammar=grammar, end_token_ids=(2,))
    return SamplePoint(sampling, 0, len(tokens) - len(PROMPT), tokens)


def allowed(masks: GrammarMasks, point: SamplePoint) -> list[int]:
    found = masks.begin([point])
    assert found is not None
    words = found.wait()[0]
    ids: list[int] = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
    return ids


def written(
    masks: GrammarMasks, grammar: str, seed: int, max_tokens: int
) -> tuple[list[int], list[list[int]]]:
    """An answer drawn from what is allowed, and what was allowed at each of its tokens."""
    numbers = np.random.default_rng(seed)
    tokens, seen = list(PROMPT), []
    while tokens[-1] != 2 and len(tokens) - len(PROMPT) < max_tokens:
        ids = allowed(masks, point_of(grammar, tokens, max_tokens))
        assert ids
        seen.append(ids)
        tokens.append(int(numbers.choice(ids)))
    return tokens, seen


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SCHEMAS), st.integers(0, 2**32), st.sampled_from([56, 80, 200]))
def test_json_is_whole_when_the_limit_comes(
    masks: GrammarMasks, files: TokenizerFiles, schema: dict[str, Any], seed: int, max_tokens: int
) -> None:
    tokens, _ = written(masks, json_grammar(schema), seed, max_tokens)
    assert tokens[-1] == 2, files.tokenizer.decode(tokens)
    jsonschema.validate(json.loads(files.tokenizer.decode(tokens[len(PROMPT) :])), schema)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(SCHEMAS), st.integers(0, 2**32), st.data())
def test_what_follows_depends_on_the_tokens_alone(
    masks: GrammarMasks, schema: dict[str, Any], seed: int, data: st.DataObject
) -> None:
    """As when a worker is lost: another one begins with the tokens, at any of them, closing or not."""
    grammar = json_grammar(schema)
    tokens, seen = written(masks, grammar, seed, 64)
    at = data.draw(st.integers(0, len(seen) - 1))
    moved = tokens[: len(PROMPT) + at]
    assert allowed(masks, point_of(grammar, moved, 64)) == seen[at]
    moved.append(tokens[len(PROMPT) + at])
    if at + 1 < len(seen):
        assert allowed(masks, point_of(grammar, moved, 64)) == seen[at + 1]


def test_an_answer_that_goes_on_elsewhere_is_looked_at_once(
    files: TokenizerFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeps the first token after a worker's death from waiting for all looks that were taken before: a third
    of a second for 300 tokens, in which no other row of the batch had any."""
    looks: list[int] = []
    real = Closer.is_due

    def is_due(self: Closer, matcher: GrammarMatcher, left: int, unit: int, every: int) -> bool:
        looks.append(left)
        return real(self, matcher, left, unit, every)

    monkeypatch.setattr(Closer, "is_due", is_due)
    grammar = json_grammar(PERSON)
    for limit in (56, 200):
        first, second = GrammarMasks(lambda: Grammars(files)), GrammarMasks(lambda: Grammars(files))
        tokens, seen = written(first, grammar, seed=7, max_tokens=limit)
        count = len(tokens) - len(PROMPT)
        assert len(looks) > 3
        looks.clear()
        assert allowed(second, point_of(grammar, tokens[:-1], limit)) == seen[count - 1]
        assert len(looks) == 1
        looks.clear()
        first.close()
        second.close()


def test_an_answer_that_goes_on_elsewhere_does_not_hold_the_engine(
    masks: GrammarMasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its tokens were accepted, and the look for closing was taken, on the engine's thread after the
    forward pass: 1.5 ms a row, unless its number of tokens happened to be one at which there are looks."""
    grammar, limit = json_grammar(PERSON), 200
    tokens, seen = written(masks, grammar, seed=7, max_tokens=limit)
    monkeypatch.setattr(masks, "_row_s", 0.0)
    count = next(at for at in range(20, len(seen)) if (limit - at) % 8)
    elsewhere = tokens[: len(PROMPT) + count]
    found = masks.begin([point_of(grammar, elsewhere, limit)])
    assert found is not None and found._is_done.wait(20.0), "nobody but the engine finds it"
    assert allowed(masks, point_of(grammar, elsewhere, limit)) == seen[count]
    monkeypatch.setattr(masks, "_row_s", 0.0)
    known = masks.begin([point_of(grammar, elsewhere, limit)])
    assert known is not None and not known._is_done.wait(0.05), "a thread was woken for what takes no time"
    known.wait()


def test_answers_that_are_over_are_not_kept(masks: GrammarMasks) -> None:
    """Of 4,096 of them a worker kept 15 kB each: it grew for hours. Those of one step all stay."""
    grammar = json_grammar(PERSON)
    for _ in range(200):
        allowed(masks, point_of(grammar, list(PROMPT)))
    assert len(masks._answers) < 100
    rows = [point_of(grammar, list(PROMPT)) for _ in range(200)]
    for _ in range(2):
        found = masks.begin(rows)
        assert found is not None and found.wait().any(axis=1).all()
        assert all(id(row.tokens) in masks._answers for row in rows)


def test_other_grammars_end_where_they_may(masks: GrammarMasks) -> None:
    for grammar in (regex_grammar("[ab]+"), lark_grammar('start: "x" start | "y"')):
        tokens, _ = written(masks, grammar, 0, 40)
        assert tokens[-1] == 2 and len(tokens) - len(PROMPT) <= 40


def test_rows_get_the_masks_of_their_own_grammars(masks: GrammarMasks) -> None:
    """A row without a grammar has none; one that left its grammar, or has a wrong one, gets nothing."""
    free = SamplePoint(Sampling(seed=0, max_tokens=5), 0, 0, PROMPT)
    assert masks.begin([free, free]) is None
    strayed = point_of(regex_grammar("a"), [*PROMPT, 500])
    broken = point_of("no grammar at all", list(PROMPT))
    found = masks.begin([free, strayed, broken, point_of(regex_grammar("a"), list(PROMPT))])
    assert found is not None and found.rows == [1, 2, 3]
    assert found.wait().any(axis=1).tolist() == [False, False, True]


class HangsAt(Grammars):
    """Compiles one grammar for as long as it is told to."""

    def __init__(self, files: TokenizerFiles, grammar: str) -> None:
        super().__init__(files)
        self.ends, self._grammar = Event(), grammar

    def compile(self, grammar: str) -> GrammarMatcher:
        if grammar == self._grammar:
            self.ends.wait(2 * STACK_PATIENCE_S)
        return super().compile(grammar)


def test_a_grammar_that_compiles_for_ever_holds_nobody_elses(files: TokenizerFiles) -> None:
    """Keeps one grammar from stopping every structured answer of a worker."""
    grammars = HangsAt(files, regex_grammar("never"))
    masks = GrammarMasks(lambda: grammars)

    def is_served(pattern: str) -> bool:
        found = masks.begin([point_of(regex_grammar(pattern), list(PROMPT))])
        return found is not None and bool(found.wait().any())

    masks.expect(regex_grammar("first")).result(STACK_PATIENCE_S)  # the vocabulary is loaded
    assert not is_served("never"), "it fails alone, in a second"
    wait_until(lambda: is_served("other"), STACK_PATIENCE_S)  # on a busy machine not within the first second
    grammars.ends.set()
    masks.close()


def test_a_way_to_close_is_not_looked_for_for_long(files: TokenizerFiles) -> None:
    """Keeps a grammar whose masks take milliseconds from stopping the structured answers of a worker for
    seconds: found by the fuzz of forms."""
    slow = lark_grammar('start: /[a-z]/{2,1000000} a a?\na: /[? |{2,1000000} ""\nb ::= \\[a-z]/* a\n')
    grammars = Grammars(files)
    closer, matcher = Closer(grammars), grammars.compile(slow)
    began_s = thread_time()
    assert closer.unit_tokens(matcher) == 0 and thread_time() - began_s < 0.5


@given(st.integers(1, 70), st.integers(1, 4), st.integers(0, 2**32))
def test_masking_in_cpp_is_masking_in_torch(vocabulary: int, rows: int, seed: int) -> None:
    library = choose("auto", device=torch.device("cpu"), dtype=torch.float32)
    if library is None:
        pytest.skip("no compiler here")
    numbers = np.random.default_rng(seed)
    words = numbers.integers(0, 2**32, (rows, words_of(vocabulary)), dtype=np.uint32)
    at = numbers.permutation(rows + 2)[:rows].tolist()
    logits = torch.randn(rows + 2, vocabulary)
    masked, expected = logits.clone(), logits.clone()
    mask_rows(masked, at, words, library)
    mask_rows(expected, at, words)
    assert torch.equal(masked, expected)
    for row in set(range(rows + 2)) - set(at):
        assert torch.equal(masked[row], logits[row])


@given(st.integers(1, 150), st.integers(1, 4), st.integers(0, 2**32), st.booleans(), st.data())
def test_the_likeliest_in_cpp_is_that_of_torch(
    vocabulary: int, rows: int, seed: int, is_held: bool, data: st.DataObject
) -> None:
    """Ties, infinities, rows that may have nothing and logits that are no numbers among them."""
    library = choose("auto", device=torch.device("cpu"), dtype=torch.float32)
    if library is None:
        pytest.skip("no compiler here")
    numbers = np.random.default_rng(seed)
    share = data.draw(st.sampled_from([0.0, 0.03, 0.5, 1.0]))
    bits = numbers.random((rows, words_of(vocabulary) * 32)) < share
    words = np.packbits(bits, axis=1, bitorder="little").view(np.uint32) if is_held else None
    at = numbers.permutation(rows + 2)[:rows].tolist()
    logits = torch.tensor(numbers.integers(-3, 4, (rows + 2, vocabulary)), dtype=torch.float32)
    for value in data.draw(st.lists(st.sampled_from([math.nan, math.inf, -math.inf]), max_size=4)):
        logits[numbers.integers(rows + 2), numbers.integers(vocabulary)] = value
    highest, tokens = likeliest(logits.clone(), library, at, words)
    expected, first = likeliest(logits.clone(), None, at, words)
    assert torch.equal(highest, expected) or torch.allclose(highest, expected, equal_nan=True)
    is_good = expected.isfinite()
    assert tokens[is_good].tolist() == first[is_good].tolist()
