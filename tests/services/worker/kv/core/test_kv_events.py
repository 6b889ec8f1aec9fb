"""A reader that applies the events in order knows what is stored where, for any history of a tree."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from services.worker.kv.core.kv_events import (
    MEDIUMS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    StoredEvents,
)
from services.worker.kv.core.radix_tree import PrefixTree, Tier

SIZE = 4
Known = dict[str, set[bytes]]


def name_of(at: int) -> bytes:
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
        node = tree.find(name_of(at))
        up = parent_of(at)
        parent = None if up is None else tree.find(name_of(up))
        if is_gained and (up is None or parent is not None):
            events.on_named(name_of(at), None if up is None else name_of(up), tokens_of(at))
            node = node or tree.add(name_of(at), parent)
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
        events.on_named(name_of(at), None if parent is None else parent.name, tokens_of(at))
        parent = tree.add(name_of(at), parent)
        tree.put(parent, Tier.DEVICE, at)
    names, tokens = [name_of(at) for at in (1, 2, 3)], [token for at in (1, 2, 3) for token in tokens_of(at)]
    stored = BlockStored(names, None, tokens, SIZE, None, "GPU", None)
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
