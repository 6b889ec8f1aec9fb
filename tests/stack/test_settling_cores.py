"""Cycles of debts settled over a bus that loses messages, with workers that die: nothing is half-done."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.stack.lending_world import HOST_BLOCKS, carry_out, few, names
from tests.stack.lending_world import moves as lending_moves
from tests.stack.settling_world import SettlingWorld, balances, ring

WORKERS = 4
Move = tuple[str, *tuple[float, ...]]
moves = st.one_of(
    lending_moves,
    st.tuples(st.just("settle")),
    st.tuples(st.just("settle")),
    st.tuples(st.just("finish_home"), names, few),
)


def test_a_ring_is_settled_in_rounds_of_what_the_bounce_buffers_hold() -> None:
    world = SettlingWorld(3)
    ring(world, [5, 4, 5])
    assert [m.grants.lent_blocks() for m in world.members.values()] == [5, 4, 5]
    world.settle()
    world.deliver_all()
    assert [m.grants.lent_blocks() for m in world.members.values()] == [1, 0, 1]
    assert (world.recalled, world.coordinator.completed, world.coordinator.aborted) == (12, 1, 0)
    assert world.coordinator.settled_tokens == 12 * 16
    world.advance(0.5)
    world.check()


def test_a_pair_that_owe_each_other() -> None:
    world = SettlingWorld(2)
    ring(world, [3, 2])
    world.settle()
    world.deliver_all()
    assert world.remote_blocks() == 1


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 7), min_size=2, max_size=4),
    st.lists(
        st.tuples(st.sampled_from(["deliver"] * 12 + ["lose", "kill", "tick"]), st.integers(0, 50)),
        max_size=120,
    ),
)
@example([1, 1], [("deliver", 0)] * 9 + [("kill", 0)])
def test_a_disturbed_settlement_leaves_whole_recalls_only(
    blocks: list[int], disturbances: list[tuple[str, int]]
) -> None:
    world = SettlingWorld(len(blocks))
    ring(world, blocks)
    before, remote = balances(world), world.remote_blocks()
    world.settle()
    killed = False
    for kind, at in disturbances:
        if kind == "tick":
            world.advance(0.2)
        elif kind == "kill":
            killed = True
            world.kill(world.names[at % len(blocks)])
        elif world.letters:
            getattr(world.letters.pop(at % len(world.letters)), kind)()
        world.check()
        assert world.remote_blocks() <= remote, "remote blocks never rise"
    for _ in range(14):
        world.deliver_all()
        world.advance(0.5)
        world.check()
    world.deliver_all()
    assert world.coordinator.running == 0
    assert not any(world.life(member).settling.is_on for member in world.members.values())
    if not killed and not any(kind == "lose" for kind, _ in disturbances):
        assert balances(world) == before, "a completed settlement changes no balance"


@settings(max_examples=50, deadline=None)
@given(st.lists(moves, max_size=80), st.sampled_from([0, HOST_BLOCKS]))
def test_any_history_keeps_contents_and_frees_what_it_froze(moves: list[Move], host_blocks: int) -> None:
    world = SettlingWorld(WORKERS, host_blocks)
    for name in world.names:
        world.beat(name)
    world.deliver_all()
    for move in moves:
        if move == ("settle",):
            world.settle()
        else:
            carry_out(world, move)
        world.check()
    for _ in range(14):
        world.deliver_all()
        world.advance(0.5)
        world.check()
    assert world.coordinator.running == 0
