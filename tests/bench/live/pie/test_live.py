"""Which live parts are run."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.kit.context import Context
from bench.kit.models import TINY_CHAT
from bench.kit.outcome import Outcome
from bench.live.pie import live
from bench.live.pie.arena import Arena


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str, quick: bool = True) -> list[str]:
    ran: list[str] = []

    def note(part: str) -> Callable[[Arena], Outcome]:
        def take(_: Arena) -> Outcome:
            ran.append(part)
            return Outcome({part: 1.0}, 0)

        return take

    for part in live.PARTS:
        monkeypatch.setitem(live.PARTS, part, note(part))
    parser = argparse.ArgumentParser()
    live.add_arguments(parser)
    flags = parser.parse_args([*words, "--model", str(TINY_CHAT)])
    outcome = live.run(Context("pie", quick, 0, folder, flags))
    assert outcome.figures["fig4_expansion"] == 1.286 and set(ran) <= set(outcome.figures)
    return ran


def test_all_parts_or_those_asked_for_in_their_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run(monkeypatch, tmp_path, quick=False) == ["step", "room", "best", "narrow", "reaction", "stack"]
    assert run(monkeypatch, tmp_path) == ["step", "room", "best", "narrow", "reaction"]
    assert run(monkeypatch, tmp_path, "--part", "stack", "room") == ["room", "stack"]
