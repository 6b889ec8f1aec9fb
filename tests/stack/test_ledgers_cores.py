"""Several ledgers that could start settlements: one does, and where two do for a while nothing is lost."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stack.ledgers_world import SILENCE_S, LedgersWorld
from tests.stack.lending_world import LEASE_S
from tests.stack.settling_world import balances, ring

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


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=2, max_size=4), disturbances)
def test_two_that_both_lead_lose_no_block_and_freeze_no_worker_twice(
    blocks: list[int], disturbances: list[Disturbance]
) -> None:
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
