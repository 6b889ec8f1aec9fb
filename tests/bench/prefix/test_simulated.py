"""The table says what was replayed, and a size at which LRU is as good is a failure."""

import json
from argparse import ArgumentParser
from pathlib import Path

import pytest

from bench.context import Context
from bench.prefix import bench, simulated
from bench.prefix.replay import Sizes
from shared.errors import ConfigError


def context_of(tmp_path: Path, *words: str) -> Context:
    parser = ArgumentParser()
    bench.add_arguments(parser)
    return Context("prefix", True, 0, tmp_path, parser.parse_args(["--processes", "1", *words]))


def test_a_run_without_data(tmp_path: Path) -> None:
    outcome = bench.run(context_of(tmp_path, "--no-live", "--trace", "chats", "--sizes", "800"))
    figures = outcome.figures
    assert figures["hit_rate_lru_800"] < figures["hit_rate_frequent_800"] < figures["hit_rate_belady_800"]
    assert figures["hit_rate_belady_800"] < figures["hit_rate_infinite"]
    assert figures["hit_rate"] == figures["hit_rate_frequent_800"]
    assert figures["hit_vs_infinite"] < figures["hit_vs_belady_800"] < 1 < figures["hit_vs_lru"]
    assert outcome.failures == 0
    assert outcome.simulated
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == 10
    assert (tmp_path / "hit_rates.png").stat().st_size > 1000


def test_a_trace_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "find", lambda path: None)
    with pytest.raises(ConfigError, match="mooncake"):
        simulated.load_trace(context_of(tmp_path, "--trace", "mooncake"))
    trace = simulated.load_trace(context_of(tmp_path))
    assert trace.name == "chats"
    assert trace.chains


def test_any_file_of_that_kind_can_be_replayed(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"hash_ids": [1, 2, at]}) + "\n" for at in range(3, 6)))
    trace = simulated.load_trace(context_of(tmp_path, "--trace", str(file)))
    assert (trace.name, len(trace.chains)) == ("mine", 3)
    file.write_text("arrival_s,prompt_tokens\n")
    with pytest.raises(ConfigError, match="hash_ids"):
        simulated.load_trace(context_of(tmp_path, "--trace", str(file)))


def test_no_better_than_lru_is_a_failure_unless_nothing_could_be() -> None:
    best = {**dict.fromkeys(simulated.POLICIES, 0.4), "lru": 0.3}
    same = {**best, simulated.OURS: 0.3}
    everything = dict.fromkeys(simulated.POLICIES, 0.5)
    outcome = simulated.outcome_of("t", 0.5, {Sizes(10): same, Sizes(5, 20): best, Sizes(90): everything})
    assert outcome.failures == 1
    assert outcome.figures["hit_vs_lru"] == 1.0
    assert outcome.figures["hit_vs_infinite_90"] == 1.0
    assert any("not better than LRU at 10" in note for note in outcome.notes)


def test_something_has_to_be_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing is measured"):
        bench.run(context_of(tmp_path, "--no-live", "--no-simulated"))
