"""Whatever is asked, evicted, loaded or lost: a block that is handed out holds the bytes of its name."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.kv.core.radix_tree import Node, Tier
from services.worker.kv.core.tier_copier import StoredBlock
from shared.blocks import BlockHash
from tests.services.worker.kv.rig import BLOCK_TOKENS, Rig, names_of, tokens_of

TOKENS = st.lists(st.integers(0, 1), min_size=2, max_size=12).map(lambda tokens: tokens_of(*tokens))
Act = Callable[[Rig, Any], object]
OF_TOKENS: dict[str, Act] = {
    "run": Rig.run,
    "begin": Rig.begin,
    "shadow": Rig.shadow,
    "prefetch": lambda rig, tokens: rig.cache.prefetch(names_of(tokens), 2),
}
OF_NUMBERS: dict[str, tuple[int, Act]] = {
    "go on": (5, Rig.go_on),
    "end": (5, Rig.end),
    "keep": (5, lambda rig, at: rig.end(at, is_kept=True)),
    "unkeep": (5, Rig.unkeep),
    "spoil": (5, lambda rig, place: rig.mover.lost_host.add(place)),
    "spoil disk": (7, lambda rig, place: rig.mover.lost_disk.add(place)),
    "spoil peers": (8, lambda rig, place: rig.mover.lost_peers.add(place)),
    "abandon": (3, lambda rig, after: setattr(rig.mover, "abandon_after", after or 1000)),
    "borrow": (4, Rig.borrow),
    "lose": (4, Rig.lose),
    "bring home": (4, Rig.bring_home),
    "retire": (4, lambda rig, blocks: rig.blocks.retire(blocks)),
    "set apart": (4, Rig.set_apart),
    "save": (4, lambda rig, blocks: rig.cache.writes.start(blocks)),
    "send": (4, lambda rig, blocks: rig.cache.peers.start(blocks)),
    "lend": (4, Rig.lend),
    "lose peers": (8, lambda rig, first: rig.lose_peers(first, 2)),
    "shadows come": (6, Rig.end_shadows),
    "time": (30, lambda rig, seconds: setattr(rig, "now_s", rig.now_s + seconds)),
    "few return": (1, lambda rig, some: few_return(rig, returning=500 * some)),
    "stores end": (1, lambda rig, ok: rig.end_stores(ok=bool(ok))),
    "sends end": (1, lambda rig, ok: rig.end_sends(ok=bool(ok))),
    "settle": (1, lambda rig, ok: rig.settle(ok=bool(ok))),
    "loads end": (0, lambda rig, _: rig.end_loads()),
    "save ahead": (0, lambda rig, _: rig.cache.save_ahead()),
    "rejoin": (0, lambda rig, _: rig.rejoin()),
    "forget": (0, lambda rig, _: rig.cache.forget_unused()),
    "give up peers": (0, lambda rig, _: rig.cache.peers.retire()),
}
"""What is done with a number: the largest, and how."""
STEP = st.one_of(
    *(st.tuples(st.just(kind), TOKENS) for kind in OF_TOKENS),
    *(st.tuples(st.just(kind), st.integers(0, most)) for kind, (most, _) in OF_NUMBERS.items()),
)


SIZES = st.tuples(
    st.one_of(st.integers(1, 8), st.integers(8, 20)),
    st.one_of(st.integers(0, 6), st.integers(6, 12)),
    st.integers(0, 8),
    st.sampled_from(["lru", "fifo", "random", "frequent"]),
    st.integers(0, 6),
    st.integers(0, 8),
    st.integers(0, 6),
)


@settings(max_examples=300)
@given(SIZES, st.lists(STEP, max_size=40))
def test_hits_hold_their_bytes_and_blocks_are_conserved(
    sizes: tuple[int, int, int, str, int, int, int], steps: list[tuple[str, Any]]
) -> None:
    device, host, disk, eviction, kept, shadows, peers = sizes
    rig = Rig(device, host, disk, eviction, kept, shadows, peers)
    is_intact = True
    for kind, value in steps:
        (OF_TOKENS[kind] if kind in OF_TOKENS else OF_NUMBERS[kind][1])(rig, value)
        is_intact = is_intact and not kind.startswith("spoil")
        assert rig.cache.kept_blocks <= min(kept, host)
        assert len(rig.cache.shadows) + len(rig.cache.shadows.open_places) <= min(shadows, host)
        for nodes in rig.kept if is_intact else ():
            nearest = [node.nearest for node in nodes]
            assert not {Tier.DISK, Tier.PEER}.intersection(nearest), "a kept block left the host"
        if not rig.mover.reads and not rig.mover.writes:
            rig.check()
    while rig.shadowing:
        rig.end_shadows(1)
    while rig.waiting:
        rig.go_on(0)
    rig.settle(ok=True)
    rig.check()
    while rig.held:
        rig.end(0)
    while rig.kept:
        rig.unkeep(0)
    rig.check()
    assert rig.cache.kept_blocks == 0 and rig.cache.keepable_blocks == min(kept, host)
    assert rig.cache.free_blocks + rig.cache.evictable_blocks == device


def test_what_is_forgotten_is_computed_again_and_what_is_used_stays() -> None:
    """In every tier, blocks that sequences have, and their beginnings, aside."""
    rig = Rig(8, 8, 8, "lru")
    for values in ((1, 2, 3, 4), (11, 12, 13, 14), (1, 2, 5, 6)):
        rig.serve(tokens_of(*values))
    rig.cache.release(rig.cache.allocate(8))
    rig.cache.writes.start(8)
    rig.settle(ok=True)
    rig.begin(tokens_of(1, 2, 5, 6))
    rig.settle(ok=True)
    forgotten, slots = rig.cache.forget_unused()
    assert forgotten >= 3 and len(set(slots)) == len(slots)
    rig.check()
    assert rig.cache.known_blocks(names_of(tokens_of(11, 12, 13, 14))) == 0
    while rig.waiting:
        rig.go_on(0)
    while rig.held:
        rig.end(0)
    rig.cache.forget_unused()
    rig.check()
    assert (rig.cache.free_blocks, rig.cache.evictable_blocks, rig.cache.forget_unused()) == (8, 0, (0, []))


@pytest.fixture
def pushed_down() -> tuple[Rig, list[BlockHash]]:
    """A cache that has a prompt of two blocks on disk alone, and the names of those."""
    rig = Rig(2, 2, 4, "lru")
    for first in (0, 10, 20):
        rig.serve(tokens_of(first, 1, 2, 3))
        rig.cache.writes.start(4)
        rig.settle(ok=True)
    return rig, names_of(tokens_of(0, 1, 2, 3))


@pytest.mark.parametrize("ok", [True, False])
def test_a_prefetched_block_is_read_once_for_two_requests(
    pushed_down: tuple[Rig, list[BlockHash]], ok: bool
) -> None:
    rig, names = pushed_down
    assert rig.cache.prefetch(names, 2) == 2
    assert rig.cache.prefetch(names, 2) == 0
    rig.settle(ok=ok)
    assert rig.acquire(names, 2).loaded == ((0, 2, 0) if ok else (0, 0, 0))


def _on_disk(rig: Rig, *prompts: bytes) -> None:
    """Prompts whose blocks are on disk alone."""
    for index, prompt in enumerate(prompts):
        names = names_of(prompt)
        for depth, (name, parent) in enumerate(zip(names, [b"", *names], strict=False)):
            rig.mover.disk[4 * index + depth] = StoredBlock(name, parent, depth, 4 * index + depth)
    assert rig.cache.restore(rig.mover.disk.values()) == len(rig.mover.disk)


def test_a_block_that_is_lost_while_it_is_read_ahead_is_a_miss_for_all() -> None:
    rig = Rig(4, 4, 4, "lru")
    prompt = tokens_of(1, 2, 3, 4)
    _on_disk(rig, prompt)
    names = names_of(prompt)
    assert rig.cache.prefetch(names, 1) == 1
    rig.mover.lost_disk.add(0)
    assert rig.acquire(names, 2).blocks == ()
    assert rig.acquire(names, 2).blocks == ()
    rig.serve(prompt)
    rig.check()
    assert rig.acquire(names, 2).loaded == (2, 0, 0)


def test_a_host_block_is_not_written_at_its_own_cost() -> None:
    """Its beginning is on disk alone, and the only copy there that may go."""
    rig = Rig(2, 2, 1, "lru")
    prompt = tokens_of(1, 2, 3, 4)
    names = names_of(prompt)
    rig.mover.disk[0] = StoredBlock(names[0], b"", 0, 0)
    assert rig.cache.restore(rig.mover.disk.values()) == 1
    rig.serve(prompt)
    for first in (10, 20):
        rig.serve(tokens_of(first, 1, 2, 3))
        rig.cache.writes.start(4)
        rig.check()


def test_a_restart_takes_over_whole_beginnings_only() -> None:
    rig = Rig(2, 2, 6, "lru")
    first, second, third = names_of(tokens_of(1, 2, 3, 4, 5, 6))
    stored = [
        StoredBlock(third, second, 2, 0),
        StoredBlock(first, b"", 0, 1),
        StoredBlock(first, b"", 0, 2),
        StoredBlock(b"orphan", b"gone", 1, 3),
        StoredBlock(second, first, 1, 4),
        StoredBlock(b"deeper than it is", first, 5, 5),
        StoredBlock(b"in no slot", b"", 0, 6),
    ]
    assert rig.cache.restore(stored) == 3
    rig.check()
    rig.mover.disk |= {block.place: block for block in stored}
    assert rig.acquire([first, second, third], 3).loaded == (0, 0, 2)


def test_nothing_that_is_needed_is_given_up_for_reading_ahead() -> None:
    rig = Rig(2, 2, 8, "lru")
    wanted, other = tokens_of(1, 2, 3, 4), tokens_of(5, 6, 7, 8)
    _on_disk(rig, wanted, other)
    names = [names_of(prompt) for prompt in (wanted, other)]
    assert rig.cache.prefetch(names[0], 4) == 2
    rig.check()
    needed = {name for chained in names for name in chained}
    assert rig.cache.prefetch(names[1], 4, needed) == 0
    assert rig.cache.prefetch(names[1], 4) == 2
    rig.check()


@pytest.mark.parametrize("is_lost", [False, True], ids=["used", "lost"])
def test_a_shadow_says_nothing_of_how_long_blocks_wait_to_be_used_again(is_lost: bool) -> None:
    """It counted as last used at the cache's first request, so that after a while each one that was used, or
    left and was computed, made the measured gap that the order `frequent` goes by much too long."""
    rig = Rig(2, 8, 0, "frequent", shadows=4)
    rig.serve(*(tokens_of(first, 1, 2, 3) for first in range(10, 110)))
    wanted, history = tokens_of(1, 2, 3, 4), rig.cache._books.history
    rig.serve(wanted)
    rig.serve(*(tokens_of(first, 1, 2, 3) for first in range(110, 116)))
    assert rig.cache._books.tree.match(names_of(wanted)) == [] and not history.mean_gap
    ghosts = dict(history._ghosts)
    rig.shadow(wanted)
    rig.end_shadows(2)
    assert len(rig.cache.shadows) == 2
    if is_lost:
        for shadow in list(rig.cache._books.shadows._renewed)[::-1]:
            rig.cache._books.remove(shadow, Tier.HOST)
        assert history._ghosts.items() >= {name: ghosts[name] for name in names_of(wanted)}.items()
    rig.serve(wanted)
    assert len(rig.cache.shadows) == 0 and history.mean_gap == 7
    rig.check()


def test_a_shadow_takes_no_copy_of_what_is_about_to_leave_the_device() -> None:
    """It was copied a second time, and the engine waited for that where it had to leave before."""
    rig = Rig(16, 2, 0, "lru", shadows=2)
    rig.serve(*(tokens_of(first, 1) for first in range(10, 26)))
    assert rig.cache.save_ahead() == 1
    rig.end_stores()
    saved = rig.cache._books.saved
    rig.shadow(tokens_of(1, 2, 3, 4))
    rig.end_shadows(2)
    assert saved == 1 and (len(rig.cache.shadows), rig.cache._books.saved) == (1, saved)
    rig.check()


def few_return(rig: Rig, *, returning: int = 0) -> None:
    """Of a thousand blocks so many were wanted again; a copy is as dear as a tenth of computing one."""
    history = rig.cache._books.history
    history._names, history._returned = 1000, returning
    rig.cache.gate.profile(Tier.HOST, 0.001)
    rig.cache.gate.on_prefilled(1, 0.010)


@pytest.mark.parametrize(("returning", "is_worth_it"), [(0, False), (100, False), (120, True)])
def test_what_nobody_will_want_leaves_without_a_copy(returning: int, is_worth_it: bool) -> None:
    """Each copy took what many times the computing of its block would not have saved."""
    rig = Rig(8, 32, 0, "lru")
    wanted = tokens_of(1, 2, 3, 4)
    rig.serve(wanted, wanted)
    few_return(rig, returning=returning)
    rig.serve(*(tokens_of(first, 1) for first in range(10, 16)))
    rig.cache.save_ahead()
    rig.end_stores()
    assert rig.cache.counts["saved_ahead"] == 1, "what was wanted twice is copied in any case"
    rig.serve(*(tokens_of(first, 1) for first in range(20, 30)))
    assert rig.cache.counts["not_saved"] == (0 if is_worth_it else 8)
    assert rig.cache.counts["saved_late"] == (9 if is_worth_it else 1)
    rig.serve(wanted)
    assert rig.cache.counts["hits_host"] == 2
    rig.check()


def test_copies_begin_again_once_blocks_come_back() -> None:
    """Dropped ones count as well: nothing has to be copied for that."""
    rig = Rig(8, 8, 0, "lru")
    prompts = [tokens_of(first, 1) for first in range(10, 26)]
    few_return(rig, returning=108)
    rig.cache.save_ahead()
    rig.serve(*prompts)
    rig.cache.save_ahead()
    counts = rig.cache.counts
    assert (counts["saved_ahead"], counts["not_saved"]) == (0, 8)
    rig.serve(*prompts[:8])
    rig.cache.save_ahead()
    assert counts["saved_ahead"] > 0
    rig.end_stores()
    rig.check()


def test_a_shadow_that_is_computed_here_is_its_tenants() -> None:
    """It was nobody's, and no tenant's share of the cache."""
    rig = Rig(4, 4, 0, "lru", shadows=4)
    (name,) = names_of(tokens_of(1, 2))
    (block,) = rig.cache.allocate(1)
    rig.shadow(tokens_of(1, 2))
    rig.end_shadows(1)
    assert rig.cache.publish(block, name, None, "a")
    node = rig.cache._books.tree.find(name)
    assert node is not None and not node.is_shadow and node.tenant == "a"
    rig.cache.release([block])
    rig.check()


def test_who_of_the_shadows_goes_next_is_found_without_a_look_at_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each time all that waited for what hangs on them were looked at: of a long sequence's blocks, which
    leave the deepest first, half of their number squared."""
    blocks = 200
    rig = Rig(4, blocks, 0, "lru", shadows=blocks)
    first, second = (tokens_of(*range(at, at + blocks * BLOCK_TOKENS)) for at in (0, 1000))
    rig.shadow(first)
    rig.end_shadows(blocks)
    assert len(rig.cache.shadows) == blocks
    rig.now_s += 100.0
    looks = 0
    is_loose = Node.is_loose

    def counted(node: Node, tier: Tier) -> bool:
        nonlocal looks
        looks += 1
        return is_loose(node, tier)

    monkeypatch.setattr(Node, "is_loose", counted)
    rig.shadow(second)
    assert looks < 40 * blocks
    rig.end_shadows(blocks)
    assert len(rig.cache.shadows) == blocks
    rig.check()
