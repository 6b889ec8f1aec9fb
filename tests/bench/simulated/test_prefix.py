"""The table says what was replayed, and a size at which LRU is as good is a failure."""

import json
import random
from pathlib import Path

import pytest

from bench.live.prefix import bench
from bench.simulated import prefix
from bench.simulated.prefix import (
    BELADY,
    PRESETS,
    Chain,
    Conversations,
    Future,
    Sizes,
    generate,
    infinite_hit_rate,
    read_mooncake,
    replay,
)
from services.worker.kv.core.eviction import ORDERS
from services.worker.kv.core.prefix_cache import PrefixCache
from shared.errors import ConfigError
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


def test_a_trace_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "find", lambda path: None)
    with pytest.raises(ConfigError, match="mooncake"):
        prefix.load_trace(context_of("prefix", tmp_path, *ALONE, "--trace", "mooncake"))
    trace = prefix.load_trace(context_of("prefix", tmp_path, *ALONE))
    assert trace.name == "chats"
    assert trace.chains


def test_any_file_of_that_kind_can_be_replayed(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"hash_ids": [1, 2, at]}) + "\n" for at in range(3, 6)))
    trace = prefix.load_trace(context_of("prefix", tmp_path, *ALONE, "--trace", str(file)))
    assert (trace.name, len(trace.chains)) == ("mine", 3)
    file.write_text("arrival_s,prompt_tokens\n")
    with pytest.raises(ConfigError, match="hash_ids"):
        prefix.load_trace(context_of("prefix", tmp_path, *ALONE, "--trace", str(file)))


def test_no_better_than_lru_is_a_failure_unless_nothing_could_be() -> None:
    best = {**dict.fromkeys(prefix.POLICIES, 0.4), "lru": 0.3}
    same = {**best, prefix.OURS: 0.3}
    everything = dict.fromkeys(prefix.POLICIES, 0.5)
    outcome = prefix.outcome_of("t", 0.5, {Sizes(10): same, Sizes(5, 20): best, Sizes(90): everything})
    assert outcome.failures == 1
    assert outcome.figures["hit_vs_lru"] == 1.0
    assert outcome.figures["hit_vs_infinite_90"] == 1.0
    assert any("not better than LRU at 10" in note for note in outcome.notes)


def test_something_has_to_be_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing is measured"):
        bench.run(context_of("prefix", tmp_path, *ALONE, "--no-live", "--no-simulated"))


def test_a_recorded_trace_keeps_what_requests_share(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 0, "hash_ids": [0, 1, 2]}, {"timestamp": 5, "hash_ids": [0, 1, 7]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = read_mooncake(file)
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert infinite_hit_rate([first, second]) == pytest.approx(2 / 6)


@pytest.mark.parametrize("line", ["{}", "no json", '{"hash_ids": [-1]}', '{"hash_ids": 3}'])
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"hash_ids": [1]}\n' + line)
    with pytest.raises(ValueError, match="line 2"):
        read_mooncake(file)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_generated_trace_repeats_with_its_seed(preset: str) -> None:
    first, again, other = (generate(PRESETS[preset], 200, random.Random(seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert len(first) == 200


def test_a_block_has_one_beginning() -> None:
    parents: dict[bytes, bytes | None] = {}
    for chain in generate(PRESETS["chats"], 500, random.Random(3)):
        for index, name in enumerate(chain):
            parent = chain[index - 1] if index else None
            assert parents.setdefault(name, parent) == parent


def test_turns_and_singles_are_as_stated() -> None:
    alone = generate(Conversations(system_prompts=1, single=1.0), 300, random.Random(4))
    assert len({chain[4] for chain in alone}) == 300
    chatty = generate(Conversations(single=0.0, turns=8.0, think=(1.0, 0.1)), 3000, random.Random(4))
    chats = len({chain[4] for chain in chatty})
    assert 3000 / 10 < chats < 3000 / 7


def test_of_nothing_nothing_is_found() -> None:
    assert infinite_hit_rate([]) == 0.0


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


def test_lower_tiers_find_what_the_device_lost() -> None:
    found = replay(chains("ab", "cd", "ef", "ab"), Sizes(2, 4), "lru").found
    assert found == (0, 2, 0)
    found = replay(chains("ab", "cd", "ef", "gh", "ab"), Sizes(2, 4, 10), "lru").found
    assert sum(found) == 2


def test_tiers_stay_consistent(trace: list[Chain]) -> None:
    def check(cache: PrefixCache) -> None:
        cache.check_integrity([])

    tiered = replay(trace[:60], Sizes(150, 300, 900), "frequent", after_each=check)
    assert tiered.found[1] > 0


def test_a_prompt_larger_than_the_cache_is_kept_as_far_as_it_fits() -> None:
    assert replay(chains("abcdef", "abcdef"), Sizes(4), "lru").found == (4, 0, 0)


def test_belady_keeps_what_is_wanted_sooner() -> None:
    prompts = chains("a", "b", "c", "a", "b")
    assert replay(prompts, Sizes(2), BELADY).found == (1, 0, 0)
    assert replay(prompts, Sizes(2), "lru").found == (0, 0, 0)


def test_the_future_ends() -> None:
    future = Future(chains("a", "b", "a"))
    assert future.next_use(b"a") == 0
    future.advance((b"a",))
    assert future.next_use(b"a") == 2
    future.advance((b"a",))
    assert future.next_use(b"a") == float("inf")


def test_an_unknown_order_is_refused(trace: list[Chain]) -> None:
    with pytest.raises(ConfigError, match="best"):
        replay(trace, Sizes(10), "best")
