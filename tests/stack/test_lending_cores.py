"""Lending of both tiers and the ledger together: whatever is late, lost or killed, no block has two hands."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages.lending import KvTier
from tests.stack.lending_world import (
    BLOCKS,
    CAP,
    GRACE_S,
    HOST_BLOCKS,
    KEEP,
    LEASE_S,
    WORKERS,
    LendingWorld,
    carry_out,
    few,
    moves,
    names,
)


@settings(max_examples=80, deadline=None)
@given(st.lists(moves, max_size=80))
def test_no_block_is_in_two_hands(moves: list[tuple[str, *tuple[float, ...]]]) -> None:
    world = LendingWorld(WORKERS, HOST_BLOCKS)
    for name in world.names:
        world.beat(name)
    world.deliver_all()
    for move in moves:
        carry_out(world, move)
        world.check()


@settings(max_examples=40, deadline=None)
@given(st.lists(moves, max_size=60), names)
def test_what_the_dead_held_comes_back_and_living_debts_stay(
    moves: list[tuple[str, *tuple[float, ...]]], killed: int
) -> None:
    world = LendingWorld(WORKERS, HOST_BLOCKS)
    for name in world.names:
        world.beat(name)
    world.deliver_all()
    for move in moves:
        carry_out(world, move)
    world.kill(world.names[killed])
    for _ in range(int((LEASE_S + GRACE_S) / 0.5) + 1):
        world.deliver_all()
        world.advance(0.5)
    world.deliver_all()
    world.advance(0.0)
    world.deliver_all()
    for name, member in world.members.items():
        for debtor, blocks in member.grants.lent_to().items():
            owed = world.members[debtor].debts.borrowed_from().get(name, 0)
            assert owed == blocks, f"{name} keeps {blocks} for {debtor}, which has {owed}"


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(names, few), min_size=1, max_size=12),
    st.lists(st.tuples(names, st.integers(1, 12)), max_size=8),
    st.lists(st.integers(0, 50), max_size=100),
)
def test_a_ledger_with_old_news_never_over_commits(
    needs: list[tuple[int, int]], busy: list[tuple[int, int]], order: list[int]
) -> None:
    """Creditors fill up after their heartbeats; debtors ask together on what the ledger still believes."""
    world = LendingWorld(WORKERS, HOST_BLOCKS)
    for name in world.names:
        world.beat(name)
    world.deliver_all()
    for worker, blocks in busy:
        world.compute(world.names[worker], blocks)
    for worker, blocks in needs:
        world.need(world.names[worker], blocks)
    for at in order:
        if world.letters:
            world.letters.pop(at % len(world.letters)).deliver()
            world.check()
    world.deliver_all()
    lent = sum(member.grants.lent_blocks() for member in world.members.values())
    borrowed = sum(member.debts.borrowed_blocks for member in world.members.values())
    assert lent == borrowed
    for member in world.members.values():
        assert member.grants.lent_blocks(KvTier.DEVICE) <= CAP
        assert member.grants.lent_blocks(KvTier.HOST) <= HOST_BLOCKS


def test_host_memory_is_lent_where_no_device_has_anything_left_and_comes_back_with_the_lease() -> None:
    world = LendingWorld(3, HOST_BLOCKS)
    for name in world.names:
        world.compute(name, BLOCKS - KEEP - (2 if name == "w1" else 0))
        world.beat(name)
    world.deliver_all()
    world.borrow("w0", 9)
    debts = world.members["w0"].debts
    assert debts.borrowed_from(KvTier.DEVICE) == {"w1": 2}, "what a device has left goes first"
    assert debts.borrowed_from(KvTier.HOST) == {"w1": 5, "w2": 2}
    world.need("w2", 9)
    world.deliver_all()
    assert world.members["w2"].debts.borrowed_from() == {"w0": 5}, "none of what it borrowed"
    world.kill("w0")
    world.silence(int((LEASE_S + GRACE_S) / 0.5) + 1)
    for name in ("w1", "w2"):
        member = world.members[name]
        assert member.grants.lent_to() == {} and member.host.free_blocks == HOST_BLOCKS
    assert world.members["w1"].pool.free_blocks == KEEP + 2
