"""The tree finds the longest stored prefix, and counts what hangs on what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.kv.core import radix_tree
from services.worker.kv.core.radix_tree import Node, PrefixTree, Tier

PATHS = st.lists(st.text("ab", min_size=1, max_size=6), max_size=12)


def names(path: str) -> list[bytes]:
    """A block for each letter, named after all letters so far."""
    return [path[: end + 1].encode() for end in range(len(path))]


def grown(paths: list[str]) -> PrefixTree:
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
    tree = grown(paths)
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
    tree = grown(paths)
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
    tree = grown(["ab"])
    before = tree.moves
    for name in names("ba"):
        tree.put(tree.add(name, None), Tier.HOST, 1)
    assert tree.moved_since(before) == names("ba") and tree.moved_since(tree.moves) == []
    node = tree.find(names("b")[0])
    assert node is not None
    tree.take(node, Tier.HOST)
    assert tree.moved_since(before) == names("ba")
    assert tree.moved_since(0) is None
