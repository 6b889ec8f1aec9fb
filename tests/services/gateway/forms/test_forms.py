"""Forms are checked where they may end a process; schemas keep their digits, or are refused by name."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import pytest_asyncio
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.gateway.forms.checks import DANGEROUS, MOST_WAITING_OF_A_KEY, CheckQueue, GrammarChecks
from services.gateway.forms.json_schemas import EXACT, LARGEST, explained, prepared
from shared.errors import InvalidRequest, Overloaded, UnavailableError
from shared.grammars import (
    MOST_GRAMMAR_CHARS,
    Grammars,
    json_grammar,
    lark_grammar,
    regex_grammar,
    words_of,
    written_grammar,
)
from shared.tokenizer_files import TokenizerFiles, load_tokenizer
from tests.patience import STACK_PATIENCE_S

MODEL = Path(__file__).resolve().parents[4] / "models" / "tiny_chat"
CRASHES = json_grammar({"type": "integer", "minimum": -(2**63), "maximum": -(2**63)})
HANGS = {"type": "integer", "exclusiveMaximum": 2**53, "multipleOf": 2**31}
GOOD = json_grammar({"type": "integer"})


@pytest_asyncio.fixture
async def checks() -> AsyncIterator[GrammarChecks]:
    checking = GrammarChecks(MODEL)
    yield checking
    checking.close()


CHAIN = "\n".join(f"a{at} ::= a{at + 1}" for at in range(2500))
DEEP = written_grammar(f'root ::= a0\n{CHAIN}\na2500 ::= "x"')


@pytest.mark.parametrize("grammar", [CRASHES, json_grammar(HANGS), regex_grammar("(a{1000}){1000}"), DEEP])
async def test_what_ends_a_checker_is_refused_and_not_tried_again(
    checks: GrammarChecks, grammar: str
) -> None:
    """Keeps one schema from ending the gateway (-2**63 as a bound) or holding it (a multiple of 2**31)."""
    await checks.check(GOOD, "x")
    process = checks._process
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="takes too much time or memory") as caught:
            await checks.check(grammar, "response_format")
        assert caught.value.param == "response_format"
    began_s = time.monotonic()
    assert (await checks.verdict(grammar, "another key")).reason == DANGEROUS
    assert time.monotonic() - began_s < 0.1, "it is known"
    assert await checks.check(json_grammar({"type": "null"}), "x") and checks._process is process


async def test_other_keys_do_not_wait_behind_it(checks: GrammarChecks) -> None:
    """Keeps four such requests from holding every structured request of everybody."""
    await checks.check(GOOD, "x")
    forms = [json_grammar({**HANGS, "title": str(at)}) for at in range(4)]
    hanging = [asyncio.create_task(checks.verdict(form, "a")) for form in forms]
    await asyncio.sleep(0.05)
    assert await checks.check(json_grammar({"const": "b"}), "x", "b")
    assert not any(task.done() for task in hanging[1:]), "a key's own wait for each other"
    assert {verdict.reason for verdict in await asyncio.gather(*hanging)} == {DANGEROUS}


async def test_a_process_that_is_killed_is_replaced(checks: GrammarChecks) -> None:
    await checks.check(GOOD, "x")
    assert checks._process is not None
    os.kill(checks._process.pid, signal.SIGKILL)
    checks._process.wait(STACK_PATIENCE_S)
    grammar, found = json_grammar({"const": "again"}), ""
    for _ in range(3):  # what was under way is said to be, and may be asked again
        try:
            found = await checks.check(grammar, "x")
        except UnavailableError:
            continue
    assert found == grammar


async def test_both_syntaxes_are_taken_and_what_is_followed_is_larks(checks: GrammarChecks) -> None:
    for text in ('root ::= "a" | root "b"', 'start: "a"'):
        assert '"lark_grammar"' in await checks.check(written_grammar(text), "x")
    for wrong in ("root ::= (", "start: b"):
        with pytest.raises(InvalidRequest, match="x is not supported"):
            await checks.check(written_grammar(wrong), "x")
    with pytest.raises(InvalidRequest, match=f"at most {MOST_GRAMMAR_CHARS}"):
        await checks.check(written_grammar("root ::= " + "(" * 4_000_000), "x")


async def test_the_part_at_fault_is_named_with_what_to_write_instead(checks: GrammarChecks) -> None:
    unique = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    schema = {"$defs": {"s": unique}, "type": "object", "properties": {"a": {"$ref": "#/$defs/s"}}}
    suspects = [("tools[0]", GOOD), ("tools[1]", json_grammar(schema))]
    whole = lark_grammar('start: call_0\ncall_0: %json {"type": "array", "uniqueItems": true}')
    with pytest.raises(InvalidRequest) as caught:
        await checks.check(whole, "tools", "", suspects)
    assert caught.value.param == "tools[1]"
    where, why = caught.value.message.split(": ", 1)
    assert where == "tools[1] is not supported at $defs.s"
    assert why == "uniqueItems is not supported: leave it out and check the answer"


def begun(turns: CheckQueue[int]) -> list[tuple[str, int]]:
    found = []
    while (turn := turns.begin()) is not None:
        found.append((turn[0], turn[2]))
    return found


def test_a_key_has_one_place_and_waits_for_itself_alone() -> None:
    turns = CheckQueue[int](range(2))
    for item in (1, 2, 3):
        turns.ask("a", item)
    assert begun(turns) == [("a", 1)], "one place stays free for others"
    turns.ask("b", 4)
    turns.ask("c", 5)
    assert begun(turns) == [("b", 4)]
    turns.end("a")
    assert begun(turns) == [("c", 5)], "who was served last comes last"
    turns.end("b")
    turns.end("c")
    assert begun(turns) == [("a", 2)]


def test_what_waits_is_bounded() -> None:
    turns = CheckQueue[int](())
    for item in range(MOST_WAITING_OF_A_KEY):
        turns.ask("a", item)
    with pytest.raises(Overloaded):
        turns.ask("a", 0)
    turns.ask("b", 0)


BORDERS = [0, 1, -1, EXACT - 1, EXACT, EXACT + 1, EXACT + 2, -EXACT - 1, 10**17, 10**18, -(10**18)]
BORDERS += [LARGEST, LARGEST + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) + 1, 10**30, -(10**30)]


@pytest.fixture(scope="module")
def files() -> TokenizerFiles:
    return load_tokenizer(str(MODEL))


@pytest.fixture(scope="module")
def grammars(files: TokenizerFiles) -> Grammars:
    return Grammars(files)


def answer(grammars: Grammars, schema: Any, seed: int, most_tokens: int = 200) -> str | None:
    """One that is drawn from what may follow; None where it does not end."""
    words = np.zeros(words_of(grammars.vocabulary), dtype=np.uint32)
    matcher, numbers, said = grammars.compile(json_grammar(schema)), np.random.default_rng(seed), b""
    texts = grammars.token_bytes()
    for _ in range(most_tokens):
        if matcher.is_terminated:
            return said.decode()
        matcher.mask(words)
        ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        token = int(numbers.choice(ids))
        matcher.accept(token)
        said += texts[token] if token not in grammars.end_token_ids else b""
    return None


KEPT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"minimum": -(2**63), "maximum": 2**63 - 1}, {"minimum": -LARGEST, "maximum": LARGEST}),
    ({"minimum": -1e308}, {"minimum": -LARGEST}),
    ({"minimum": EXACT + 1}, {"minimum": EXACT + 2}),
    ({"maximum": EXACT + 3}, {"maximum": EXACT + 2}),
    ({"exclusiveMinimum": EXACT, "maximum": 2**54}, {"minimum": EXACT + 2, "maximum": 2**54}),
    ({"exclusiveMaximum": True, "maximum": EXACT}, {"maximum": EXACT - 1}),
    ({"exclusiveMaximum": 2**60, "maximum": 5}, {"maximum": 5}),
    ({"minimum": 10**18}, {"minimum": 10**18, "maximum": LARGEST}),
    ({"minimum": 5e-324}, {"minimum": 1e-50}),
    ({"minimum": 0.1, "multipleOf": 0.01}, {"minimum": 0.1, "multipleOf": 0.01}),
    ({"format": "path"}, {}),
    ({"format": "uuid"}, {"format": "uuid"}),
    ({"format": "email"}, {"format": "email", "maxLength": 64}),
    ({"format": "uri", "maxLength": 500}, {"format": "uri", "maxLength": 500}),
    ({"maxLength": 2**32, "maxItems": 10**19, "uniqueItems": False}, {}),
    ({"enum": [{"format": "email"}, EXACT, 2**60, 1e16, -0.0, 0.1]},) * 2,
]


@pytest.mark.parametrize(("schema", "expected"), KEPT)
@pytest.mark.parametrize("around", [lambda x: x, lambda x: {"properties": {"format": {"anyOf": [x]}}}])
def test_what_is_rewritten(around: Any, schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert prepared(around(schema), "x") == around(expected)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"id": {"const": EXACT + 1}}}, "properties.id.const: 9007199254740993 would lose digits"),
    ({"items": {"enum": [1, [{"a": -(2**63)}]]}}, r"items.enum\[1\]\[0\].a: -9223372036854775808"),
    ({"enum": [10**30]}, "as a string"),
    ({"const": 1e30}, "as a string"),
    ({"minimum": 10**30, "maximum": 10**30 + 3}, "minimum: no answer is beyond"),
    ({"maximum": -(10**30)}, "maximum: no answer is beyond"),
    ({"minimum": EXACT + 1, "maximum": EXACT + 1}, "no number between the bounds"),
    ({"anyOf": [{"multipleOf": 2**31}]}, r"anyOf\[0\].multipleOf: multipleOf 2147483648 has too many steps"),
    ({"multipleOf": 0}, "multipleOf"),
    ({"items": {"minLength": 2**31}}, "items.minLength: no answer is so long"),
    ({"pattern": "\\S{2147483648}"}, "pattern: no answer is so long"),
    ({"multipleOf": 0.07}, "multipleOf 0.07"),
]


@pytest.mark.parametrize(("schema", "said"), REFUSED)
def test_what_would_lose_digits_is_refused_by_name(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        prepared(schema, "tools[0]")
    assert caught.value.param == "tools[0]" and caught.value.message.startswith("tools[0] is not supported")


bounds = st.one_of(st.sampled_from(BORDERS), st.integers(-(2**64), 2**64))


@settings(max_examples=60)
@example({"minimum": LARGEST, "maximum": LARGEST}, "number", 0)
@example({"minimum": -LARGEST, "maximum": -LARGEST}, "number", 0)
@given(
    st.dictionaries(
        st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]), bounds, min_size=1
    ),
    st.sampled_from(["integer", "number"]),
    st.integers(0, 2**32),
)
def test_numbers_keep_to_bounds(grammars: Grammars, asked: dict[str, Any], kind: str, seed: int) -> None:
    """Keeps bounds beyond 2**53 from being rounded or clipped. In exact arithmetic, not in doubles."""
    schema = {"type": kind, **asked}
    try:
        ready = prepared(schema, "x")
        grammars.check(json_grammar(ready))
    except InvalidRequest:
        return
    text = answer(grammars, ready, seed)
    if text is not None and "." not in text:
        jsonschema.validate(int(text), schema)


@pytest.mark.parametrize("form", ["email", "uri", "hostname", "date-time", "time", "duration"])
def test_texts_of_a_format_end(grammars: Grammars, form: str) -> None:
    """Keeps a model that finds no end from an address of 10,000 letters: whatever is chosen, it ends."""
    one = {"anyOf": [{"type": "string", "format": form}, {"type": "null"}]}
    schema = {"type": "object", "properties": {"format": one}, "additionalProperties": False}
    ready = prepared({**schema, "required": ["format"]}, "x")
    assert all(answer(grammars, ready, seed) is not None for seed in range(5))


def test_what_the_library_says_becomes_a_sentence() -> None:
    """And whatever it says is short and has nothing of the grammar's own text."""
    assert explained('Unimplemented keys: ["if", "uniqueItems"]') == (
        "if, uniqueItems is not supported: write anyOf with a branch for each case; "
        "leave it out and check the answer"
    )
    assert "$ref" in explained("NoExtensionBias")
    assert explained("regex parse error:\n    (a\n    ^\nerror: unclosed group").endswith("unclosed group")
    assert len(explained("x" * 10_000 + "\ncall_0: …")) < 400


def test_a_schema_of_a_thousand_levels_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        prepared(json.loads('{"items":' * 900 + "{}" + "}" * 900), "x")
