"""Books of an inventory and their tree: slots are conserved, readers of its events know what it has."""

import random
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.placement.core.prefix_index import PrefixIndex
from services.worker.kv.core import prefix_news as news_module
from services.worker.kv.core import radix_tree
from services.worker.kv.core.block_manager import Inventory, Tiers
from services.worker.kv.core.block_pool import BlockPool, block_table, first_borrowed, joined
from services.worker.kv.core.eviction import Lru, ReuseHistory, SlotPool, order_maker
from services.worker.kv.core.kv_events import (
    MEDIUMS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    StoredEvents,
)
from services.worker.kv.core.prefix_news import PrefixNews
from services.worker.kv.core.radix_tree import Node, PrefixTree, Tier
from shared.blocks import HASH_BYTES
from shared.messages.prefixes import FindPrefixes, PrefixChain, WorkerPrefixes


def books_of(device: int = 4, host: int = 2, disk: int = 2) -> Inventory:
    return Inventory(BlockPool(device, 2), Tiers(host, disk), order_maker("lru"))


@pytest.fixture
def books() -> Iterator[Inventory]:
    made = books_of()
    yield made
    made.check_integrity([])


def grown(books: Inventory, tier: Tier, *names: bytes) -> list[Node]:
    """A chain of blocks in one tier."""
    nodes: list[Node] = []
    for name in names:
        node = books.enter(name, nodes[-1] if nodes else None)
        place = books.pool.allocate(1)[0] if tier is Tier.DEVICE else books.slot(tier)
        assert place is not None
        books.put(node, tier, place)
        nodes.append(node)
    return nodes


def test_what_is_needed_is_not_given_up(books: Inventory) -> None:
    grown(books, Tier.HOST, b"a")
    grown(books, Tier.HOST, b"b")
    assert books.slot(Tier.HOST, {b"a", b"b"}) is None
    place = books.slot(Tier.HOST, {b"a"})
    assert place is not None
    assert books.tree.find(b"b") is None
    assert books.counts["lost_unsaved"] == 1
    books.host.give(place)


def test_certain_slots_can_be_claimed_once() -> None:
    shelf = SlotPool(5, Lru(ReuseHistory()))
    shelf.claim([4, 0])
    shelf.check_integrity([0, 4])
    for wrong in ([0], [1, 1], [5]):
        with pytest.raises(ValueError, match="not free"):
            shelf.claim(wrong)
    shelf.check_integrity([0, 4])


IDS = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@given(tables=st.lists(st.tuples(st.booleans(), IDS), max_size=6))
def test_tables_and_lists_are_joined_in_order(tables: list[tuple[bool, list[int]]]) -> None:
    made = [block_table(ids) if is_table else ids for is_table, ids in tables]
    flat = joined(made)
    assert flat.dtype == np.int32
    assert flat.tolist() == [each for _, ids in tables for each in ids]


def test_a_table_grows_while_what_was_joined_is_kept() -> None:
    table = block_table([4, 2])
    before = joined([table])
    first_borrowed(table, 3)
    table.extend([9])
    table[0] = 5
    assert before.tolist() == [4, 2] and table.tolist() == [5, 2, 9]


@given(ids=IDS, own_blocks=st.integers(0, 2**31 - 1))
def test_the_first_borrowed_block(ids: list[int], own_blocks: int) -> None:
    """Against the plain search."""
    expected = next((at for at, block in enumerate(ids) if block >= own_blocks), len(ids))
    assert first_borrowed(block_table(ids), own_blocks) == expected


PATHS = st.lists(st.text("ab", min_size=1, max_size=6), max_size=12)


def names(path: str) -> list[bytes]:
    """A block for each letter, named after all letters so far."""
    return [path[: end + 1].encode() for end in range(len(path))]


def tree_of(paths: list[str]) -> PrefixTree:
    tree = PrefixTree()
    for path in paths:
        parent: Node | None = None
        for name in names(path):
            node = tree.find(name)
            if node is None:
                node = tree.add(name, parent)
                tree.put(node, Tier.DEVICE, len(tree))
            parent = node
    return tree


@given(PATHS, st.text("ab", max_size=8))
def test_the_longest_stored_prefix_is_found(paths: list[str], wanted: str) -> None:
    tree = tree_of(paths)
    tree.check_integrity()
    longest = max(
        (end for end in range(len(wanted) + 1) if any(path.startswith(wanted[:end]) for path in paths)),
        default=0,
    )
    found = tree.match(names(wanted))
    assert [node.name for node in found] == names(wanted)[:longest]
    assert [node.depth for node in found] == list(range(longest))


@given(PATHS)
def test_leaves_can_be_taken_until_nothing_is_left(paths: list[str]) -> None:
    tree = tree_of(paths)
    while len(tree):
        loose = [node for node in tree if node.is_loose(Tier.DEVICE)]
        assert all(not node.children for node in loose)
        for node in loose:
            tree.take(node, Tier.DEVICE)
            tree.forget(node)
        assert loose
        tree.check_integrity()


def test_the_journal_names_each_moved_block_once_or_says_that_it_forgot_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(radix_tree, "_KEPT_MOVES", 3)
    tree = tree_of(["ab"])
    before = tree.moves
    for name in names("ba"):
        tree.put(tree.add(name, None), Tier.HOST, 1)
    assert tree.moved_since(before) == names("ba") and tree.moved_since(tree.moves) == []
    node = tree.find(names("b")[0])
    assert node is not None
    tree.take(node, Tier.HOST)
    assert tree.moved_since(before) == names("ba")
    assert tree.moved_since(0) is None


def name_of(number: int) -> bytes:
    return number.to_bytes(HASH_BYTES, "big")


class Cached:
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
            _ask(cached, index, now_s)
        index.check_integrity()
        cached.books.check_integrity([])
    now_s += 1.0
    cached.store(999)  # The last event shows the reader what it missed.
    last = cached.news.take(now_s)
    assert last is not None
    index.on_news(last)
    for _ in range(3):
        now_s += 1.0
        _ask(cached, index, now_s)
    assert index.blocks("w0") == len(cached.books.tree)
    for node in cached.books.tree:
        tokens = index.cached("w0", [PrefixChain(block_tokens=1, names=node.name)], now_s)
        assert tokens[node.nearest] == 1


def _ask(cached: Cached, index: PrefixIndex, now_s: float) -> None:
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


SIZE = 4
Known = dict[str, set[bytes]]


def hash_of(at: int) -> bytes:
    return bytes([at]) * 16


def tokens_of(at: int) -> list[int]:
    return [100 * at + token for token in range(SIZE)]


def parent_of(at: int) -> int | None:
    return None if at == 0 else (at - 1) // 2


def apply(known: Known, events: list[Event]) -> None:
    for event in events:
        if isinstance(event, AllBlocksCleared):
            known.clear()
        elif isinstance(event, BlockRemoved):
            known[str(event.medium)] -= set(event.block_hashes)
        else:
            assert len(event.token_ids) == SIZE * len(event.block_hashes)
            assert event.block_size == SIZE
            known.setdefault(str(event.medium), set()).update(event.block_hashes)


@given(
    st.lists(st.tuples(st.integers(0, 14), st.sampled_from(Tier), st.booleans(), st.booleans()), max_size=80)
)
def test_a_reader_knows_what_is_stored(history: list[tuple[int, Tier, bool, bool]]) -> None:
    tree, known = PrefixTree(), Known()
    events = StoredEvents(tree, SIZE)
    apply(known, events.take())
    for at, tier, is_gained, is_looked in history:
        node = tree.find(hash_of(at))
        up = parent_of(at)
        parent = None if up is None else tree.find(hash_of(up))
        if is_gained and (up is None or parent is not None):
            events.on_named(hash_of(at), None if up is None else hash_of(up), tokens_of(at))
            node = node or tree.add(hash_of(at), parent)
            if node.places[tier] is None:
                tree.put(node, tier, at)
        elif node is not None and not is_gained and not node.children and node.places[tier] is not None:
            tree.take(node, tier)
            if not node.stored:
                tree.forget(node)
        if is_looked:
            apply(known, events.take())
            events.check_integrity()
    apply(known, events.take())
    stored = {MEDIUMS[tier]: {node.name for node in tree if node.places[tier] is not None} for tier in Tier}
    assert {medium: names for medium, names in known.items() if names} == {
        medium: names for medium, names in stored.items() if names
    }


def test_consecutive_blocks_are_one_event() -> None:
    tree = PrefixTree()
    events = StoredEvents(tree, SIZE)
    parent = None
    for at in (1, 2, 3):
        events.on_named(hash_of(at), None if parent is None else parent.name, tokens_of(at), "a")
        parent = tree.add(hash_of(at), parent)
        tree.put(parent, Tier.DEVICE, at)
    names, tokens = [hash_of(at) for at in (1, 2, 3)], [token for at in (1, 2, 3) for token in tokens_of(at)]
    stored = BlockStored(names, None, tokens, SIZE, None, "GPU", "a")
    assert events.take() == [AllBlocksCleared(), stored]
    assert events.take() == []


def test_the_encoding_is_vllms() -> None:
    stored = BlockStored([b"a"], None, [1, 2], 2, None, "CPU", None)
    batch = EventBatch(1.5, [stored, BlockRemoved([b"b"], "GPU"), AllBlocksCleared()], 3)
    fields = {"block_hashes": [b"a"], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 2}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch)) == [
        1.5,
        [
            {"type": "BlockStored", **fields, "lora_id": None, "medium": "CPU", "lora_name": None},
            {"type": "BlockRemoved", "block_hashes": [b"b"], "medium": "GPU"},
            {"type": "AllBlocksCleared"},
        ],
        3,
    ]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=EventBatch) == batch
