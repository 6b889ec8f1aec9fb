"""Grammars are checked where they may end a process: what crashes, hangs or fills the memory is refused."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.gateway.forms.checks import DANGEROUS, MOST_WAITING_OF_A_KEY, CheckQueue, GrammarChecks
from shared.errors import InvalidRequest, Overloaded, UnavailableError
from shared.grammars import MOST_GRAMMAR_CHARS, json_grammar, lark_grammar, regex_grammar, written_grammar
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
async def test_what_ends_a_checker_is_refused_and_never_tried_again(
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
    hanging = [
        asyncio.create_task(checks.verdict(json_grammar({**HANGS, "title": str(at)}), "a")) for at in range(4)
    ]
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
