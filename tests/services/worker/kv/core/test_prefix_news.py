"""Events for placement: a reader ends up with what the cache has, whichever events are lost."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.placement.core.prefix_index import PrefixIndex
from services.worker.kv.core import prefix_news as news_module
from services.worker.kv.core.block_manager import Inventory, Tiers
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.core.eviction import order_maker
from services.worker.kv.core.prefix_news import PrefixNews
from services.worker.kv.core.radix_tree import Node, Tier
from shared.blocks import HASH_BYTES
from shared.messages.prefixes import FindPrefixes, PrefixChain, WorkerPrefixes


def name_of(number: int) -> bytes:
    return number.to_bytes(HASH_BYTES, "big")


class Cached:
    """An inventory and its events."""

    def __init__(self, device: int = 8, host: int = 8) -> None:
        self.books = Inventory(BlockPool(device, 1), Tiers(host), order_maker("lru"))
        self.news = PrefixNews(self.books.tree, "w0", 7, interval_s=0.2)

    def store(self, number: int, parent: Node | None = None, tier: Tier = Tier.HOST) -> Node:
        node = self.books.tree.find(name_of(number)) or self.books.enter(name_of(number), parent)
        place = self.books.pool.allocate(1)[0] if tier is Tier.DEVICE else self.books.slot(tier)
        assert place is not None
        self.books.put(node, tier, place)
        return node


def test_an_event_says_what_is_there_and_what_is_gone() -> None:
    cached = Cached()
    first = cached.store(1)
    cached.store(2, tier=Tier.DEVICE)
    news = cached.news.take(1.0)
    assert news is not None and (news.seq, news.incarnation, news.full) == (1, 7, False)
    assert news.added == name_of(1) + name_of(2) and news.tiers == bytes([1, 0])
    cached.books.remove(first, Tier.HOST)
    assert cached.news.take(1.1) is None, "not before the interval is over"
    news = cached.news.take(1.21)
    assert news is not None and news.removed == name_of(1) and not news.added
    assert cached.news.take(9.0) is None, "nothing changed"


def test_a_reader_gets_the_events_it_missed_or_everything() -> None:
    cached = Cached(device=100, host=100)
    for number in range(70):
        cached.store(number)
        cached.news.take(float(number))
    some = cached.news.answer(FindPrefixes(incarnation=7, since_seq=68))
    assert (some.seq, some.full, some.added) == (70, False, name_of(68) + name_of(69))
    assert cached.news.answer(FindPrefixes(incarnation=7, since_seq=70)).added == b""
    for since, incarnation in ((0, 7), (5, 7), (68, 6), (71, 7)):
        everything = cached.news.answer(FindPrefixes(incarnation=incarnation, since_seq=since))
        assert everything.full and len(everything.tiers) == 70, (since, incarnation)


def test_more_than_one_message_holds_is_told_nearest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(news_module, "MOST_NEWS_BLOCKS", 3)
    cached = Cached()
    parent = cached.store(1)
    for number in (2, 3):
        parent = cached.store(number, parent)
    for number in (4, 5):
        cached.store(number, tier=Tier.DEVICE)
    news = cached.news.take(1.0)
    assert news is not None and news.full, "so many changes do not fit into one message"
    assert news.added == name_of(4) + name_of(5) + name_of(1)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), loss=st.sampled_from([0.0, 0.2, 0.7]))
def test_a_reader_catches_up_whatever_is_lost(seed: int, loss: float) -> None:
    rng = random.Random(seed)
    cached, index, now_s = Cached(), PrefixIndex(retry_s=0.1), 0.0
    late: list[WorkerPrefixes] = []
    for _ in range(60):
        now_s += 0.25
        _change(cached, rng)
        news = cached.news.take(now_s)
        if news is not None and rng.random() > loss:
            (late.append if rng.random() < 0.3 else index.on_news)(news)
        if late and rng.random() < 0.5:
            index.on_news(late.pop())
        if rng.random() < 0.3:
            _answer(cached, index, now_s)
        index.check_integrity()
        cached.books.check_integrity([])
    now_s += 1.0
    cached.store(999)  # The last event shows the reader what it missed.
    last = cached.news.take(now_s)
    assert last is not None
    index.on_news(last)
    for _ in range(3):
        now_s += 1.0
        _answer(cached, index, now_s)
    assert index.blocks("w0") == len(cached.books.tree)
    for node in cached.books.tree:
        tokens = index.cached("w0", [PrefixChain(block_tokens=1, names=node.name)], now_s)
        assert tokens[node.nearest] == 1


def _answer(cached: Cached, index: PrefixIndex, now_s: float) -> None:
    for worker_id, question in index.questions(now_s):
        assert worker_id == "w0"
        index.on_answer(cached.news.answer(question))


def _change(cached: Cached, rng: random.Random) -> None:
    """Store or remove a random block."""
    books, tier = cached.books, rng.choice([Tier.DEVICE, Tier.HOST])
    loose = [node for node in books.tree if node.is_loose(tier)]
    if loose and rng.random() < 0.5:
        books.remove(rng.choice(loose), tier)
        return
    free = books.pool.free_blocks if tier is Tier.DEVICE else books.host.free
    number = rng.randrange(12)
    node = books.tree.find(name_of(number))
    if free and (node is None or node.places[tier] is None):
        cached.store(number, tier=tier)
