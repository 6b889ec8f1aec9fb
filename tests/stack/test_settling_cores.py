"""Cycles of debts settled over a bus that loses messages, by one ledger or several: nothing is half-done."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.stack.ledgers_world import SILENCE_S, LedgersWorld
from tests.stack.lending_world import HOST_BLOCKS, LEASE_S, carry_out, few, names
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


@settings(max_examples=50)
@given(
    st.lists(st.integers(1, 7), min_size=2, max_size=4),
    st.lists(
        st.tuples(st.sampled_from(["deliver"] * 12 + ["lose", "kill", "tick"]), st.integers(0, 50)),
        max_size=120,
    ),
)
@example([1, 1], [("deliver", 0)] * 9 + [("kill", 0)])
def test_disturbed_it_leaves_whole_recalls(blocks: list[int], disturbances: list[tuple[str, int]]) -> None:
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


@settings(max_examples=50)
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


TICK_S = 0.2
TICKS_IN_A_LEASE = int(LEASE_S / TICK_S / 2)
"""With more nothing is delivered for so long that leases end."""
Disturbance = tuple[str, int]
disturbances = st.lists(
    st.tuples(
        st.sampled_from(
            ["deliver"] * 12
            + ["look"] * 4
            + ["announce"] * 3
            + ["lose", "kill", "tick", "kill ledger", "start ledger", "beat"]
        ),
        st.integers(0, 50),
    ),
    max_size=150,
)


def make_ring(blocks: list[int]) -> LedgersWorld:
    """Debts in a circle that every ledger knows of, and nobody leads yet."""
    world = LedgersWorld(len(blocks))
    ring(world, blocks)
    return world


def completed(world: LedgersWorld) -> int:
    """How many the ledgers have settled, between them."""
    return sum(ledger.coordinator.completed for ledger in world.ledgers.values())


def test_the_smallest_id_leads_and_settles_and_the_other_takes_over() -> None:
    world = make_ring([5, 4, 5])
    world.quiet_s(SILENCE_S - 0.5)
    assert completed(world) == 0, "they listen first"
    world.quiet_s(1.0)
    assert world.leaders() == ["l0"]
    counts = {name: ledger.coordinator.completed for name, ledger in world.ledgers.items()}
    assert counts == {"l0": 1, "l1": 0}
    world.kill_ledger("l0")
    world.quiet_s(SILENCE_S + 0.5)
    assert world.leaders() == ["l1"]
    world.start_ledger("l0")
    world.quiet_s(SILENCE_S - 0.5)
    assert world.leaders() == [], "it listens first, and is heard already"
    world.quiet_s(1.0)
    assert world.leaders() == ["l0"]


def both_lead(blocks: list[int]) -> LedgersWorld:
    """Neither hears the other, both hear the workers and themselves."""
    world = make_ring(blocks)
    for _ in range(round(SILENCE_S / 0.5) + 1):
        for ledger in world.ledgers.values():
            ledger.leadership.on_announced(ledger.ledger_id, ledger.incarnation, world.now_s)
        for name in world.names:
            world.beat(name)
        world.deliver_all()
        world.advance(0.5)
    assert world.leaders() == ["l0", "l1"]
    return world


@settings(max_examples=60)
@given(st.lists(st.integers(1, 7), min_size=2, max_size=4), disturbances)
def test_two_that_both_lead_lose_no_block(blocks: list[int], disturbances: list[Disturbance]) -> None:
    world = both_lead(blocks)
    before, remote = balances(world), world.remote_blocks()
    for ledger_id in world.ledgers:
        world.look(ledger_id)
    assert len(world.letters) == 2 * len(blocks), "both ask everybody"
    for kind, at in disturbances:
        disturb(world, kind, at)
        world.check()
        assert world.remote_blocks() <= remote, "remote blocks never rise"
    for ledger_id in world.ledgers:
        world.start_ledger(ledger_id)
    world.quiet_s(12.0)
    assert world.leaders() == ["l0"], "one again"
    kinds = [kind for kind, _ in disturbances]
    if {"kill", "lose"}.isdisjoint(kinds) and kinds.count("tick") < TICKS_IN_A_LEASE:
        assert balances(world) == before, "a completed settlement changes no balance"
        assert min(owed(world).values()) == 0, "the circle is gone"


def disturb(world: LedgersWorld, kind: str, at: int) -> None:
    """One thing that may happen."""
    ledger_id = f"l{at % 2}"
    worker = world.names[at % len(world.names)]
    match kind:
        case "tick":
            world.advance(TICK_S)
        case "kill":
            world.kill(worker)
        case "beat":
            world.beat(worker)
        case "look":
            world.look(ledger_id)
        case "announce":
            world.announce(ledger_id)
        case "kill ledger":
            world.kill_ledger(ledger_id)
        case "start ledger":
            world.start_ledger(ledger_id)
        case _ if world.letters:
            getattr(world.letters.pop(at % len(world.letters)), kind)()


def owed(world: LedgersWorld) -> dict[str, int]:
    """Blocks that each worker borrows."""
    return {name: sum(member.debts.borrowed_from().values()) for name, member in world.members.items()}
