"""The table says what was replayed, and a size at which LRU is as good is a failure."""

import random
from pathlib import Path

import pytest

from bench.live.prefix import bench
from bench.simulated import prefix
from bench.simulated.prefix import (
    BELADY,
    PRESETS,
    Chain,
    Sizes,
    generate,
    infinite_hit_rate,
    read_mooncake,
    replay,
)
from services.worker.kv.core.eviction import ORDERS
from services.worker.kv.core.prefix_cache import PrefixCache
from tests.bench.rig import context_of

ALONE = ("--processes", "1")


def test_a_run_without_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "_QUICK_REQUESTS", 900)
    outcome = bench.run(
        context_of("prefix", tmp_path, *ALONE, "--no-live", "--trace", "chats", "--sizes", "800")
    )
    figures = outcome.figures
    assert figures["hit_rate_lru_800"] < figures["hit_rate_frequent_800"] < figures["hit_rate_belady_800"]
    assert figures["hit_rate_belady_800"] < figures["hit_rate_infinite"]
    assert figures["hit_rate"] == figures["hit_rate_frequent_800"]
    assert figures["hit_vs_infinite"] < figures["hit_vs_belady_800"] < 1 < figures["hit_vs_lru"]
    assert outcome.failures == 0
    assert outcome.simulated
    assert len((tmp_path / "requests.jsonl").read_text().splitlines()) == 10
    assert (tmp_path / "hit_rates.png").stat().st_size > 1000


def test_no_better_than_lru_is_a_failure_unless_nothing_could_be() -> None:
    best = {**dict.fromkeys(prefix.POLICIES, 0.4), "lru": 0.3}
    same = {**best, prefix.OURS: 0.3}
    everything = dict.fromkeys(prefix.POLICIES, 0.5)
    outcome = prefix.outcome_of("t", 0.5, {Sizes(10): same, Sizes(5, 20): best, Sizes(90): everything})
    assert outcome.failures == 1
    assert outcome.figures["hit_vs_lru"] == 1.0
    assert outcome.figures["hit_vs_infinite_90"] == 1.0
    assert any("not better than LRU at 10" in note for note in outcome.notes)


@pytest.mark.parametrize("line", ["{}", "no json", '{"hash_ids": [-1]}', '{"hash_ids": 3}'])
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"hash_ids": [1]}\n' + line)
    with pytest.raises(ValueError, match="line 2"):
        read_mooncake(file)


@pytest.fixture(scope="module")
def trace() -> list[Chain]:
    return generate(PRESETS["chats"], 400, random.Random(5))


def chains(*prompts: str) -> list[Chain]:
    return [tuple(prompt[: end + 1].encode() for end in range(len(prompt))) for prompt in prompts]


@pytest.mark.parametrize("policy", [*ORDERS, BELADY])
def test_a_cache_that_holds_everything_finds_everything(trace: list[Chain], policy: str) -> None:
    replayed = replay(trace, Sizes(100_000), policy)
    assert replayed.hit_rate == pytest.approx(infinite_hit_rate(trace))
    assert replayed.asked == sum(map(len, trace))


@pytest.mark.parametrize("policy", ORDERS)
def test_belady_finds_most(trace: list[Chain], policy: str) -> None:
    assert replay(trace, Sizes(400), policy).hit_rate < replay(trace, Sizes(400), BELADY).hit_rate


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("blocks", [400, 1200])
def test_our_order_finds_more_than_lru(preset: str, blocks: int) -> None:
    made = generate(PRESETS[preset], 1200, random.Random(6))
    ours, lru = (replay(made, Sizes(blocks), policy).hit_rate for policy in ("frequent", "lru"))
    assert ours > lru


def test_tiers_stay_consistent(trace: list[Chain]) -> None:
    def check(cache: PrefixCache) -> None:
        cache.check_integrity([])

    tiered = replay(trace[:60], Sizes(150, 300, 900), "frequent", after_each=check)
    assert tiered.found[1] > 0
