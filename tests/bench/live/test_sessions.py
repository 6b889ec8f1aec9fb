"""`bench sessions`: what is drawn, what counts as computed again, ratios, and a short run."""

import asyncio
from itertools import chain
from random import Random
from typing import Any

import pytest

from bench.kit.load import Answer, Target
from bench.live import sessions
from bench.live.sessions import Found, Session, Taken, Talk, Turn, drawn, found_of, outcome
from shared.errors import InternalError

KV_TOKENS = 4096


def taken(prompt: int, cached: int, known: int, error: str = "") -> Taken:
    answer = Answer(
        1.0, [] if error else [1.5], 2.0, 10, prompt_tokens=prompt, cached_tokens=cached, error=error
    )
    return Taken(answer, known)


def test_sessions_are_equal_for_a_seed_share_systems_and_stay_below_the_context() -> None:
    one, again, other = (list(drawn(Random(seed), 60, KV_TOKENS)) for seed in (1, 1, 2))
    assert one == again != other
    assert len({session.system for session in one}) == 3
    assert {len(session.turns) for session in one} >= {6, 12}, "whole ones"
    assert min(len(session.turns) for session in one) < 6, "abandoned ones"
    for session in chain(one, drawn(Random(3), 60, KV_TOKENS // 2)):
        words = session.system + "".join(turn.text for turn in session.turns)
        assert (
            session.turns and len(words) / 4.2 + sum(turn.answer_tokens for turn in session.turns) < KV_TOKENS
        )
        assert all(0 <= turn.pause_s <= 6 for turn in session.turns)


def test_tokens_that_an_earlier_turn_computed_count_as_computed_again() -> None:
    found = found_of(
        "ours", [taken(100, 0, 0), taken(200, 50, 110), taken(200, 190, 110), taken(0, 0, 9, "no")], 2.0
    )
    assert found == Found(265.0, 0.5, 0.5, computed=1 - 240 / 500, again=60 / 500, failed=1)
    with pytest.raises(InternalError, match="ours served nothing: no"):
        found_of("ours", [taken(0, 0, 9, "no")], 2.0)


def test_ratios_are_taken_within_a_seed_and_the_worst_is_the_slowest() -> None:
    def many(*tok_s: float) -> list[Found]:
        return [Found(each, 1 / each, 2 / each, 0.1, 0.1, 1) for each in tok_s]

    found = outcome({(1, "vllm"): many(1, 2, 4), (1, "kvasir"): many(2, 6, 8), (1, "ample"): many(4, 6, 8)})
    figures = found.figures
    assert found.failures == 9 and len(found.tables[0].rows) == 9
    assert [figures[f"tok_s_vs_vllm_kvasir_1{end}"] for end in ("", "_worst", "_low", "_high")] == [
        2,
        2,
        2,
        3,
    ]
    assert [figures[f"ttft_p99_vs_vllm_kvasir_1{end}"] for end in ("", "_worst")] == [0.5, 0.5]
    assert [figures[f"of_ample_kvasir_1{end}"] for end in ("", "_worst")] == [1.0, 0.5]
    assert not any("vllm_vllm" in name or "ample_ample" in name for name in figures)
    assert not outcome({(1, "kvasir"): many(1.0)}).figures, "nothing to compare with"


def test_a_session_served_in_two_halves_goes_on_with_its_own_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    async def complete(_target: Target, body: dict[str, Any], _deadline_s: float) -> Answer:
        asked.append([message["content"] for message in body["messages"]])
        text = f"answer {len(asked)}"
        return Answer(1.0, [1.5], 2.0, 2, prompt_tokens=5, pieces=[text])

    monkeypatch.setattr(sessions, "complete", complete)
    talk = Talk(Session("system", tuple(Turn(f"turn {at}", 8, 0.0) for at in range(1, 4))))
    halves = [asyncio.run(sessions._served([Target(1, "m")], [talk], 1, share))[0] for share in (0.5, 1.0)]
    assert [len(taken) for taken in halves] == [2, 1]
    assert asked[-1] == ["system", "turn 1", "answer 1", "turn 2", "answer 2", "turn 3"]
    assert [one.known_tokens for one in chain(*halves)] == [0, 7, 7]


def test_a_restart_is_compared_with_the_same_turns_without_one() -> None:
    half = {(1, name): [Found(tok_s, 1, 1, 0, 0, 0)] for name, tok_s in (("disk", 4.0), ("restarted", 3.0))}
    figures = outcome(half | {(1, "vllm"): [Found(1.0, 1, 1, 0, 0, 0)]}).figures
    assert figures == {f"after_restart_1{end}": 0.75 for end in ("", "_low", "_high", "_worst")}
