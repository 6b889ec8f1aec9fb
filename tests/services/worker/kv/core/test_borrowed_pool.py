"""Own blocks first, borrowed ones behind them, and no block twice, whatever comes and goes."""

from collections.abc import Mapping

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.core.borrowed_pool import ExtendedPool
from services.worker.kv.core.radix_tree import Tier
from tests.services.worker.kv.rig import Rig, names_of, tokens_of

OWN = 6


class Pools(RuleBasedStateMachine):
    """Sequences that take and give back while blocks are borrowed, retired and lost."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = ExtendedPool(BlockPool(OWN, 4), OWN)
        self.held: list[list[int]] = []
        self.lost: set[int] = set()
        self.apart: list[int] = []
        self.pool.on_moved = self.move
        self.following = OWN

    @rule(blocks=st.integers(1, 5))
    def borrow(self, blocks: int) -> None:
        self.pool.admit(range(self.following, self.following + blocks))
        self.following += blocks

    @rule(blocks=st.integers(0, 8))
    def allocate(self, blocks: int) -> None:
        own_free = self.pool.own.free_blocks
        if not self.pool.can_allocate(blocks):
            with pytest.raises(ValueError, match="asked for"):
                self.pool.allocate(blocks)
            return
        taken = self.pool.allocate(blocks)
        assert sum(block < OWN for block in taken) == min(blocks, own_free)
        self.held.append(taken)

    @precondition(lambda self: self.held)
    @rule(at=st.integers(0, 100))
    def release(self, at: int) -> None:
        self.pool.release(self.held.pop(at % len(self.held)))

    @rule(blocks=st.integers(0, 6))
    def retire(self, blocks: int) -> None:
        before = self.pool.borrowed_free_blocks
        assert len(self.pool.retire(blocks)) == min(blocks, before)

    @rule(blocks=st.sets(st.integers(OWN, 60), max_size=6))
    def lose(self, blocks: set[int]) -> None:
        self.pool.lose(blocks)
        self.lost |= blocks
        self.held = [[block for block in row if block not in blocks] for row in self.held]

    def move(self, moves: Mapping[int, int]) -> None:
        self.held = [[moves.get(block, block) for block in row] for row in self.held]

    @rule(blocks=st.lists(st.integers(OWN, 40), max_size=6, unique=True), most=st.integers(0, 4))
    def set_apart(self, blocks: list[int], most: int) -> None:
        chosen = self.pool.set_apart(blocks, most)
        assert len(chosen) <= most and set(chosen) <= set(blocks) and not set(chosen) & set(self.apart)
        self.apart += chosen

    @precondition(lambda self: self.apart)
    @rule(count=st.integers(1, 4))
    def rejoin(self, count: int) -> None:
        self.pool.rejoin(self.apart[:count])
        del self.apart[:count]

    @precondition(lambda self: self.apart)
    @rule(count=st.integers(1, 4))
    def come_home(self, count: int) -> None:
        pool = self.pool
        count = min(count, len(self.apart), pool.own.free_blocks)
        home = pool.own.allocate(count)
        pool.own.withdraw(home)
        before = [block for row in self.held for block in row]
        spare = pool.come_home(zip(self.apart[:count], home, strict=True))
        gone = set(self.apart[:count])
        assert len(home) - len(spare) == len(gone & set(before))
        assert not gone & {block for row in self.held for block in row}
        del self.apart[:count]
        pool.own.readmit(spare)

    @invariant()
    def whole(self) -> None:
        self.pool.check_integrity([block for row in self.held for block in row])
        assert self.pool.total_blocks == OWN + self.pool.borrowed_blocks


TestPools = Pools.TestCase
TestPools.settings = settings(max_examples=60, stateful_step_count=30)


@pytest.mark.parametrize("is_computed_anew", [False, True])
def test_what_hangs_on_a_lost_block_stays_with_who_has_a_copy_of_that(is_computed_anew: bool) -> None:
    """It is found by nobody until somebody has computed again what was lost, and free with its user's end."""
    rig = Rig(5, 0, 0, "lru")
    cache, blocks = rig.cache, rig.blocks
    first, second, third = names_of(tokens_of(0, 1, 2, 3, 4, 5))
    one, *rest = blocks.allocate(5)
    rig.borrow(1)
    (there,) = blocks.allocate(1)
    cache.publish(one, first, None)
    cache.publish(there, second, first)
    assert cache.acquire([first], 1).blocks == (one,)
    twin, after, *spare = rest
    assert not cache.publish(twin, second, first)
    assert cache.publish(after, third, second)
    blocks.release([one, there, *spare])
    blocks.lose([there])
    blocks.check_integrity([one, twin, after])
    if is_computed_anew:
        assert cache.publish(twin, second, first)
    found = cache.acquire([first, second, third], 3).blocks
    assert found == ((one, twin, after) if is_computed_anew else (one,))
    blocks.check_integrity([one, twin, after, *found])
    blocks.release(found)
    blocks.release([one, twin, after])
    assert (cache.evictable_blocks, cache.free_blocks) == ((3, 2) if is_computed_anew else (1, 4))
    blocks.check_integrity([])


def test_what_is_cached_at_a_creditor_goes_when_its_block_is_needed() -> None:
    rig = Rig(2, 0, 0, "lru")
    rig.borrow(3)
    prompt = tokens_of(0, 1, 2, 3, 4, 5, 6, 7)
    rig.serve(prompt)
    assert (rig.blocks.cached_blocks, rig.blocks.borrowed_free_blocks) == (2, 3)
    assert rig.blocks.retire(3, cached=False) == [4], "the one that holds nothing"
    rig.cache.shed(2)
    assert rig.blocks.cached_blocks == 0, "what hung on those is forgotten"
    rig.serve(prompt)
    rig.blocks.release(rig.blocks.allocate(2))
    assert rig.blocks.borrowed_free_blocks == 2 and rig.blocks.retire(9) == [3, 2]


def test_what_comes_home_keeps_its_name() -> None:
    rig = Rig(4, 0, 0, "lru")
    others = rig.blocks.allocate(2)
    rig.borrow(2)
    prompt = tokens_of(0, 1, 2, 3, 4, 5, 6, 7)
    rig.serve(prompt)
    rig.blocks.release(others)
    rig.bring_home(2)
    assert rig.blocks.borrowed_blocks == 0
    assert rig.acquire(names_of(prompt), 4).loaded == (4, 0, 0)


def test_what_hangs_on_a_lost_block_and_is_nowhere_else_is_forgotten() -> None:
    """The lost one itself is on the host as well."""
    rig = Rig(2, 2, 0, "lru")
    cache, blocks = rig.cache, rig.blocks
    first, second, third = names_of(tokens_of(0, 1, 2, 3, 4, 5))
    rig.borrow(1)
    own, there = blocks.allocate(2), blocks.allocate(1)
    held = [*there, *own]
    for block, name, parent in zip(held, (first, second, third), (None, first, second), strict=True):
        cache.publish(block, name, parent)
    blocks.release(held)
    node = cache._books.node_of(there[0])
    assert node is not None
    cache._books.put(node, Tier.HOST, cache._books.slot(Tier.HOST) or 0)
    blocks.lose(there)
    blocks.check_integrity([])
    assert cache.free_blocks == 2 and [one.name for one in cache._books.tree] == [first]
