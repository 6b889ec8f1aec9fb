"""The ledger's side of a settlement, and its leadership. With faults: tests/stack/test_settling_cores.py"""

from hypothesis import given
from hypothesis import strategies as st

from services.ledger.core.dgfm.coordinator import Coordinator, Leadership, SettlementAsk, SettleRules
from shared.messages.lending import Settled, SettlePhase

RING = {("a", "b"): 64, ("b", "c"): 48, ("c", "a"): 80}
SIZES = {"a": 16, "b": 16, "c": 16}
RULES = SettleRules(threshold_tokens=32, interval_s=1.0, most_at_once=2)


def answer(ask: SettlementAsk, blocks: int, bounce: int = 2) -> Settled:
    asked = ask.message
    bounce_blocks = bounce if asked.phase is SettlePhase.FREEZE else 0
    return Settled(
        settlement=asked.settlement,
        phase=asked.phase,
        round=asked.round,
        blocks=blocks,
        bounce_blocks=bounce_blocks,
    )


def play(
    coordinator: Coordinator, asks: list[SettlementAsk], bounce: int = 2
) -> list[tuple[SettlePhase, int, int]]:
    """Let all workers agree; return (phase, round, blocks) in order."""
    seen: list[tuple[SettlePhase, int, int]] = []
    while asks:
        coordinator.check_integrity()
        seen.append((asks[0].message.phase, asks[0].message.round, asks[0].message.blocks))
        following: list[SettlementAsk] = []
        for ask in asks:
            reply = answer(ask, ask.message.blocks, bounce)
            following += coordinator.on_answer(ask.message, ask.worker_id, reply)
        asks = following
    return seen


def test_a_round_settles_what_the_bounce_buffers_hold() -> None:
    coordinator = Coordinator("l", RULES)
    asks = coordinator.on_tick(RING, SIZES, 0.0)
    assert {ask.worker_id: (ask.message.creditor_id, ask.message.debtor_id) for ask in asks} == {
        "a": ("b", "c"),
        "b": ("c", "a"),
        "c": ("a", "b"),
    }
    assert play(coordinator, asks) == [
        (SettlePhase.FREEZE, 0, 3),
        (SettlePhase.COPY, 0, 2),
        (SettlePhase.COMMIT, 0, 2),
        (SettlePhase.COPY, 1, 1),
        (SettlePhase.COMMIT, 1, 1),
        (SettlePhase.UNFREEZE, 2, 0),
    ]
    assert (coordinator.completed, coordinator.aborted, coordinator.settled_tokens) == (1, 0, 3 * 48)
    assert coordinator.running == 0


def test_the_smallest_answer_counts_and_small_amounts_are_given_up() -> None:
    coordinator = Coordinator("l", RULES)
    asks = coordinator.on_tick(RING, SIZES, 0.0)
    following: list[SettlementAsk] = []
    for ask in asks:
        following += coordinator.on_answer(ask.message, ask.worker_id, answer(ask, 1))
    assert [ask.message.phase for ask in following] == [SettlePhase.UNFREEZE] * 3
    play(coordinator, following)
    assert (coordinator.completed, coordinator.aborted, coordinator.running) == (0, 1, 0)


def test_no_worker_commits_before_all_have_copied() -> None:
    coordinator = Coordinator("l", RULES)
    asks = coordinator.on_tick(RING, SIZES, 0.0)
    copies: list[SettlementAsk] = []
    for ask in asks:
        copies += coordinator.on_answer(ask.message, ask.worker_id, answer(ask, 3))
    first, second, third = copies
    assert coordinator.on_answer(first.message, first.worker_id, answer(first, 2)) == []
    assert coordinator.on_answer(second.message, second.worker_id, answer(second, 2)) == []
    over = coordinator.on_answer(third.message, third.worker_id, None)
    assert [ask.message.phase for ask in over] == [SettlePhase.UNFREEZE] * 3
    assert coordinator.on_answer(third.message, third.worker_id, answer(third, 2)) == [], "too late"
    coordinator.check_integrity()


def test_cycles_that_share_a_worker_wait_and_unknown_workers_are_left_out() -> None:
    coordinator = Coordinator("l", RULES)
    debts = {("a", "b"): 64, ("b", "a"): 64, ("b", "c"): 48, ("c", "b"): 48, ("d", "e"): 64, ("e", "d"): 64}
    asks = coordinator.on_tick(debts, SIZES, 0.0)
    assert coordinator.busy() == {"a", "b"}
    assert coordinator.on_tick(debts, SIZES, 0.5) == [], "not yet"
    assert coordinator.on_tick(debts, SIZES, 1.0) == [], "b is busy"
    play(coordinator, asks)
    assert coordinator.on_tick({("b", "c"): 48, ("c", "b"): 48}, SIZES, 2.0) != []


def test_workers_may_have_blocks_of_different_sizes() -> None:
    coordinator = Coordinator("l", RULES)
    asks = coordinator.on_tick({("a", "b"): 64, ("b", "a"): 64}, {"a": 16, "b": 32}, 0.0)
    assert {ask.worker_id: ask.message.blocks for ask in asks} == {"a": 4, "b": 2}


SILENCE_S = 2.0


def make(ledger_id: str = "ledger-1", incarnation: int = 5) -> Leadership:
    return Leadership(ledger_id, incarnation, silence_s=SILENCE_S)


def hear(one: Leadership, *lives: tuple[str, int], from_s: float, to_s: float) -> None:
    """Announce ledgers every half second."""
    for half in range(round(2 * from_s), round(2 * to_s) + 1):
        for ledger_id, incarnation in lives:
            one.on_announced(ledger_id, incarnation, half / 2)
        one.check_integrity()


def test_a_single_ledger_leads_after_listening() -> None:
    one = make()
    assert not one.leads(100.0), "it has not even heard itself"
    hear(one, ("ledger-1", 5), from_s=0.0, to_s=1.5)
    assert not one.leads(1.9)
    hear(one, ("ledger-1", 5), from_s=2.0, to_s=2.0)
    assert one.leads(2.0)
    assert one.leads(4.0)
    assert not one.leads(4.1), "cut off"


def test_the_smallest_id_leads_until_it_is_silent() -> None:
    first, second = make("ledger-0", 1), make()
    for one in (first, second):
        hear(one, ("ledger-0", 1), ("ledger-1", 5), from_s=0.0, to_s=4.0)
    assert (first.leads(4.0), second.leads(4.0)) == (True, False)
    assert second.heard(4.0) == ["ledger-0", "ledger-1"]
    hear(second, ("ledger-1", 5), from_s=4.5, to_s=6.0)
    assert second.leads(6.1)
    assert second.heard(6.1) == ["ledger-1"]
    hear(second, ("ledger-0", 2), ("ledger-1", 5), from_s=6.5, to_s=6.5)
    assert not second.leads(6.5), "a new life of it is there"


def test_a_stopped_ledger_listens_again() -> None:
    one = make()
    hear(one, ("ledger-1", 5), from_s=0.0, to_s=3.0)
    assert one.leads(3.0)
    hear(one, ("ledger-1", 5), from_s=60.0, to_s=61.0)
    assert not one.leads(61.0)
    hear(one, ("ledger-1", 5), from_s=61.5, to_s=62.0)
    assert one.leads(62.0)


def test_the_later_of_two_incarnations_leads() -> None:
    old, new = make(incarnation=5), make(incarnation=6)
    for one in (old, new):
        hear(one, ("ledger-1", 5), ("ledger-1", 6), from_s=0.0, to_s=3.0)
    assert (old.leads(3.0), new.leads(3.0)) == (False, True)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=5, unique=True),
    st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1)), max_size=60),
)
def test_exactly_one_leads_once_all_have_heard_all(ids: list[int], noise: list[tuple[int, float]]) -> None:
    lives = [(f"ledger-{number}", 1) for number in ids]
    ledgers = [make(*life) for life in lives]
    now_s = 0.0
    for number, step_s in noise:  # Earlier announcements, heard by some ledgers.
        now_s += step_s
        ledgers[number % len(ledgers)].on_announced(f"ledger-{number}", 1, now_s)
        for one in ledgers:
            one.leads(now_s)
            one.check_integrity()
    now_s = round(now_s) + 10.0
    for one in ledgers:
        hear(one, *lives, from_s=now_s, to_s=now_s + SILENCE_S)
    leaders = [life for life, one in zip(lives, ledgers, strict=True) if one.leads(now_s + SILENCE_S)]
    assert leaders == [min(lives)]
