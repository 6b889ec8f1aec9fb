"""Whatever is asked, evicted, loaded or lost: a block that is handed out holds the bytes of its name."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.kv.core.radix_tree import Node, Tier
from services.worker.kv.core.tier_copier import StoredBlock
from shared.blocks import BlockHash
from tests.services.worker.kv.rig import BLOCK_TOKENS, Rig, names_of, tokens_of

TOKENS = st.lists(st.integers(0, 1), min_size=2, max_size=12).map(lambda tokens: tokens_of(*tokens))
NUMBERS = {
    "go on": 5,
    "end": 5,
    "keep": 5,
    "unkeep": 5,
    "spoil": 5,
    "spoil disk": 7,
    "spoil peers": 8,
    "abandon": 3,
    "borrow": 4,
    "lose": 4,
    "bring home": 4,
    "retire": 4,
    "set apart": 4,
    "save": 4,
    "send": 4,
    "lend": 4,
    "lose peers": 8,
    "shadows come": 6,
    "time": 30,
    "few return": 1,
    "stores end": 1,
    "sends end": 1,
    "settle": 1,
    **dict.fromkeys(["loads end", "save ahead", "rejoin", "forget", "give up peers"], 0),
}
"""What is done with a number, and the largest."""
STEP = st.one_of(
    *(st.tuples(st.just(kind), TOKENS) for kind in ("run", "begin", "prefetch", "shadow")),
    *(st.tuples(st.just(kind), st.integers(0, most)) for kind, most in NUMBERS.items()),
)


def act(rig: Rig, kind: str, value: Any) -> None:
    cache, mover = rig.cache, rig.mover
    match kind:
        case "run" | "begin" | "shadow":
            getattr(rig, kind)(value)
        case "prefetch":
            cache.prefetch(names_of(value), 2)
        case "borrow" | "lend" | "lose":
            getattr(rig, kind)(value)
        case "bring home":
            rig.bring_home(value)
        case "set apart":
            rig.set_apart(value)
        case "rejoin":
            rig.rejoin()
        case "retire":
            rig.blocks.retire(value)
        case "go on" if rig.waiting:
            rig.go_on(value)
        case "end" | "keep" if rig.held:
            rig.end(value, is_kept=kind == "keep")
        case "unkeep" if rig.kept:
            cache.unkeep(rig.kept.pop(value % len(rig.kept)))
        case "shadows come" if rig.shadowing:
            rig.end_shadows(value)
        case "time":
            rig.now_s += value
        case "few return":
            few_return(rig, returning=500 * value)
        case "save ahead":
            cache.save_ahead()
        case "save":
            cache.writes.start(value)
        case "send":
            cache.peers.start(value)
        case "forget":
            cache.forget_unused()
        case "lose peers":
            rig.lose_peers(value, 2)
        case "give up peers":
            cache.peers.retire()
        case "spoil":
            mover.lost_host.add(value)
        case "spoil disk":
            mover.lost_disk.add(value)
        case "spoil peers":
            mover.lost_peers.add(value)
        case "abandon":
            mover.abandon_after = value or 1000
        case "loads end":
            rig.end_loads()
        case "stores end":
            rig.end_stores(ok=bool(value))
        case "sends end":
            rig.end_sends(ok=bool(value))
        case "settle":
            rig.settle(ok=bool(value))


@settings(max_examples=300)
@given(
    st.one_of(st.integers(1, 8), st.integers(8, 20)),
    st.one_of(st.integers(0, 6), st.integers(6, 12)),
    st.integers(0, 8),
    st.sampled_from(["lru", "fifo", "random", "frequent"]),
    st.integers(0, 6),
    st.integers(0, 8),
    st.integers(0, 6),
    st.lists(STEP, max_size=40),
)
def test_hits_hold_their_bytes_and_blocks_are_conserved(
    device: int,
    host: int,
    disk: int,
    eviction: str,
    kept: int,
    shadows: int,
    peers: int,
    steps: list[tuple[str, Any]],
) -> None:
    rig = Rig(device, host, disk, eviction, kept, shadows, peers)
    is_intact = True
    for kind, value in steps:
        act(rig, kind, value)
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
        rig.cache.unkeep(rig.kept.pop())
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
        parents = [b"", *names[:-1]]
        stored = [
            StoredBlock(name, parent, depth, 4 * index + depth)
            for depth, (name, parent) in enumerate(zip(names, parents, strict=True))
        ]
        rig.mover.disk |= {block.place: block for block in stored}


def test_a_block_that_is_lost_while_it_is_read_ahead_is_a_miss_for_all() -> None:
    rig = Rig(4, 4, 4, "lru")
    prompt = tokens_of(1, 2, 3, 4)
    _on_disk(rig, prompt)
    assert rig.cache.restore(rig.mover.disk.values()) == 2
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
    assert rig.cache.restore(rig.mover.disk.values()) == 4
    names = [names_of(prompt) for prompt in (wanted, other)]
    assert rig.cache.prefetch(names[0], 4) == 2
    rig.check()
    needed = {name for chained in names for name in chained}
    assert rig.cache.prefetch(names[1], 4, needed) == 0
    assert rig.cache.prefetch(names[1], 4) == 2
    rig.check()


def test_what_is_kept_outlives_a_storm_on_device_and_host() -> None:
    rig = Rig(3, 4, 0, "lru", kept=2)
    rig.run(tokens_of(1, 2, 3, 4, 5, 6))
    kept = rig.cache.keep(rig.names[0])
    assert len(kept) == 2, "as much as there is room for"
    rig.cache.release(rig.held.pop())
    assert rig.mover.host == {}, "nothing is copied before it has to be"
    rig.serve(*(tokens_of(first, 1, 2, 3, 4, 5) for first in range(10, 40, 10)))
    assert rig.acquire(rig.names[0], 3).loaded == (0, 2, 0)
    rig.cache.unkeep(kept)
    assert rig.cache.keepable_blocks == 2


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
