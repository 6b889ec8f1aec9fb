"""The bench's table says what was replayed, and a size at which LRU is as good is a failure."""

from argparse import ArgumentParser
from pathlib import Path

import pytest

from bench.context import Context
from bench.prefix import simulated
from bench.prefix.replay import Sizes
from shared.errors import ConfigError


def context_of(tmp_path: Path, *words: str) -> Context:
    parser = ArgumentParser()
    simulated.add_arguments(parser)
    return Context("prefix", True, 0, tmp_path, parser.parse_args(words))


def test_a_run_without_data(tmp_path: Path) -> None:
    outcome = simulated.run(context_of(tmp_path, "--trace", "chats", "--sizes", "800"))
    figures = outcome.figures
    assert figures["hit_rate_lru_800"] < figures["hit_rate_frequent_800"] < figures["hit_rate_belady_800"]
    assert figures["hit_rate_belady_800"] < figures["hit_rate_infinite"]
    assert 0 < figures["gap_to_belady_closed_800"] < 1
    assert outcome.failures == 0
    assert outcome.simulated
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == 10


def test_a_trace_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "find", lambda path: None)
    with pytest.raises(ConfigError, match="mooncake"):
        simulated.load_trace(context_of(tmp_path, "--trace", "mooncake"))
    name, trace = simulated.load_trace(context_of(tmp_path))
    assert name == "chats"
    assert trace


def test_no_better_than_lru_is_a_failure() -> None:
    same = dict.fromkeys(simulated.POLICIES, 0.2)
    better = {**same, simulated.OURS: 0.25, "belady": 0.4}
    outcome = simulated.outcome_of("t", 0.5, {Sizes(10): same, Sizes(5, 20): better})
    assert outcome.failures == 1
    assert outcome.figures["gap_to_belady_closed_5+20"] == pytest.approx(0.25)
    assert outcome.figures["least_gain_over_lru"] == 1.0
    assert any("not better than LRU at 10" in note for note in outcome.notes)
