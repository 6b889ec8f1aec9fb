"""A worker's part in a settlement, step by step. With faults: tests/stack/test_settling_cores.py."""

from services.worker.peers.lending.core.debts import Debts
from services.worker.peers.lending.core.grants import Grants, Terms
from services.worker.peers.lending.core.settling import Copy, Settling, Swap
from services.worker.peers.lending.core.table import BlockState, RBlockTable
from shared.messages.lending import Settle, Settled, SettlePhase
from tests.services.worker.peers.lending.builders import borrow, grant


def worker(*, lent: int = 3, borrowed: int = 3) -> tuple[Settling, RBlockTable, Debts]:
    """A worker that owes `c` and is owed by `d`, with two bounce blocks."""
    table = RBlockTable("w", 10)
    grants, debts = Grants(table, 1, Terms(most_blocks=5)), Debts(table, 1)
    grants.lend(borrow("d", blocks=lent), range(lent), 0.0)
    debts.on_granted(grant("c", *range(20, 20 + borrowed)), 0.0)
    debts.take(borrowed)
    settling = Settling(table, debts, grants)
    settling.bounce = [8, 9]
    return settling, table, debts


def step(phase: SettlePhase, *, blocks: int = 2, round: int = 0, name: str = "s") -> Settle:
    return Settle(settlement=name, phase=phase, round=round, blocks=blocks, creditor_id="c", debtor_id="d")


def blocks_of(outcome: object) -> int:
    assert isinstance(outcome, Settled)
    return outcome.blocks


def test_a_round_from_freeze_to_unfreeze() -> None:
    settling, table, _ = worker()
    frozen = settling.on_settle(step(SettlePhase.FREEZE), 0.0)
    assert isinstance(frozen, Settled) and (frozen.blocks, frozen.bounce_blocks) == (2, 2)
    assert settling.on_settle(step(SettlePhase.FREEZE), 0.0) == frozen, "asked again"
    copy = settling.on_settle(step(SettlePhase.COPY), 1.0)
    assert copy == Copy(((10, 8), (11, 9)))
    settling.check_integrity()
    assert settling.on_copied(step(SettlePhase.COPY), copy, whole=True).blocks == 2
    assert blocks_of(settling.on_settle(step(SettlePhase.COPY), 1.0)) == 2, "asked again"
    swap = settling.on_settle(step(SettlePhase.COMMIT), 2.0)
    assert isinstance(swap, Swap) and swap.pairs == ((10, 8), (11, 9)) and swap.answer.blocks == 2
    assert [one.message.blocks for one in swap.repayments] == [(20, 21)]
    assert blocks_of(settling.on_settle(step(SettlePhase.COMMIT), 2.0)) == 2, "asked again"
    assert settling.bounce == []
    settling.check_integrity()
    settling.on_settle(step(SettlePhase.UNFREEZE), 3.0)
    assert not settling.is_on
    assert table.in_state(BlockState.RETURNING) == [10, 11]
    settling.check_integrity()


def test_at_most_the_owed_and_lent_blocks_are_frozen() -> None:
    assert blocks_of(worker(lent=1)[0].on_settle(step(SettlePhase.FREEZE, blocks=9), 0.0)) == 1
    assert blocks_of(worker(borrowed=2)[0].on_settle(step(SettlePhase.FREEZE, blocks=9), 0.0)) == 2
    without_bounce = worker()[0]
    without_bounce.bounce = []
    assert blocks_of(without_bounce.on_settle(step(SettlePhase.FREEZE), 0.0)) == 0


def test_one_settlement_runs_at_a_time_and_unknown_ones_get_zero_blocks() -> None:
    settling, _, _ = worker()
    settling.on_settle(step(SettlePhase.FREEZE), 0.0)
    assert blocks_of(settling.on_settle(step(SettlePhase.FREEZE, name="other"), 0.0)) == 0
    for phase in (SettlePhase.COPY, SettlePhase.COMMIT):
        assert blocks_of(settling.on_settle(step(phase, name="other"), 0.0)) == 0
    assert blocks_of(settling.on_settle(step(SettlePhase.COMMIT), 0.0)) == 0, "nothing was copied"


def test_an_incomplete_copy_does_not_count() -> None:
    settling, table, _ = worker()
    settling.on_settle(step(SettlePhase.FREEZE), 0.0)
    copy = settling.on_settle(step(SettlePhase.COPY), 0.0)
    assert isinstance(copy, Copy)
    assert settling.on_copied(step(SettlePhase.COPY), copy, whole=False).blocks == 0
    assert blocks_of(settling.on_settle(step(SettlePhase.COMMIT), 0.0)) == 0
    settling.on_settle(step(SettlePhase.UNFREEZE), 0.0)
    assert len(table.in_state(BlockState.USED)) == 3
    assert settling.bounce == [8, 9]


def test_silence_thaws_and_late_copies_are_dropped() -> None:
    settling, table, _ = worker()
    settling.on_settle(step(SettlePhase.FREEZE), 0.0)
    copy = settling.on_settle(step(SettlePhase.COPY), 1.0)
    assert isinstance(copy, Copy)
    settling.tick(5.9)
    assert len(table.in_state(BlockState.FROZEN)) == 2
    settling.tick(6.0)
    assert len(table.in_state(BlockState.FROZEN)) == 0
    assert len(table.in_state(BlockState.USED)) == 3
    assert settling.on_copied(step(SettlePhase.COPY), copy, whole=True).blocks == 0
    settling.check_integrity()


def test_a_sequence_that_ends_meanwhile_leaves_its_copy_as_a_bounce_block() -> None:
    settling, _, debts = worker()
    settling.on_settle(step(SettlePhase.FREEZE), 0.0)
    copy = settling.on_settle(step(SettlePhase.COPY), 0.0)
    assert isinstance(copy, Copy)
    settling.on_copied(step(SettlePhase.COPY), copy, whole=True)
    debts.release([10])
    swap = settling.on_settle(step(SettlePhase.COMMIT), 0.0)
    assert isinstance(swap, Swap) and swap.pairs == ((11, 9),)
    assert settling.bounce == [8]
    settling.check_integrity()


def test_a_creditor_that_dies_ends_the_settlement() -> None:
    settling, _, debts = worker()
    settling.on_settle(step(SettlePhase.FREEZE), 0.0)
    settling.on_lost(debts.on_creditor_gone("c"))
    assert not settling.is_on
    settling.check_integrity()
