"""The ledger's side of a settlement, answer by answer; under faults: tests/stack/test_settling_cores.py."""

from services.ledger.core.dgfm.coordinator import Coordinator, SettlementAsk, SettleRules
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
    """Everybody can do everything: (phase, round, blocks) in the order in which they were asked."""
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


def test_rounds_of_what_the_bounce_buffers_hold() -> None:
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


def test_the_smallest_answer_counts_and_too_little_is_given_up() -> None:
    coordinator = Coordinator("l", RULES)
    asks = coordinator.on_tick(RING, SIZES, 0.0)
    following: list[SettlementAsk] = []
    for ask in asks:
        following += coordinator.on_answer(ask.message, ask.worker_id, answer(ask, 1))
    assert [ask.message.phase for ask in following] == [SettlePhase.UNFREEZE] * 3
    play(coordinator, following)
    assert (coordinator.completed, coordinator.aborted, coordinator.running) == (0, 1, 0)


def test_nobody_commits_before_all_have_copied() -> None:
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


def test_blocks_of_different_size() -> None:
    coordinator = Coordinator("l", RULES)
    asks = coordinator.on_tick({("a", "b"): 64, ("b", "a"): 64}, {"a": 16, "b": 32}, 0.0)
    assert {ask.worker_id: ask.message.blocks for ask in asks} == {"a": 4, "b": 2}
