"""A replay counts what the cache finds; nothing finds more than Belady's order or an infinite cache."""

import random

import pytest

from bench.prefix.replay import BELADY, Future, Sizes, replay
from bench.prefix.trace import PRESETS, Chain, generate, infinite_hit_rate
from services.worker.kv.cache import PrefixCache
from services.worker.kv.eviction import ORDERS
from shared.errors import ConfigError


@pytest.fixture(scope="module")
def trace() -> list[Chain]:
    return generate(PRESETS["chats"], 1000, random.Random(5))


def chains(*prompts: str) -> list[Chain]:
    return [tuple(prompt[: end + 1].encode() for end in range(len(prompt))) for prompt in prompts]


@pytest.mark.parametrize("policy", [*ORDERS, BELADY])
def test_a_cache_that_holds_everything_finds_everything(trace: list[Chain], policy: str) -> None:
    replayed = replay(trace, Sizes(100_000), policy)
    assert replayed.hit_rate == pytest.approx(infinite_hit_rate(trace))
    assert replayed.asked == sum(map(len, trace))


@pytest.mark.parametrize("policy", ORDERS)
def test_belady_finds_most(trace: list[Chain], policy: str) -> None:
    assert replay(trace, Sizes(800), policy).hit_rate < replay(trace, Sizes(800), BELADY).hit_rate


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("blocks", [500, 2500])
def test_our_order_finds_more_than_lru(preset: str, blocks: int) -> None:
    made = generate(PRESETS[preset], 2500, random.Random(6))
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
