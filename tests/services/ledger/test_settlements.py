"""Settlements over a real bus: workers that answer, one that does not, and a ledger that ends."""

import asyncio

from services.ledger.core.dgfm.coordinator import SettleRules
from services.ledger.service import Settlements
from shared import subjects
from shared.bus import Endpoint, Handler
from shared.errors import CreditorLost
from shared.messages.lending import Settle, Settled, SettlePhase
from tests.conftest import ConnectBus

HANDLERS: tuple[Handler, ...] = (Endpoint(subjects.worker_settle, Settle, "settle"),)
DEBTS = {("w0", "w1"): 160, ("w1", "w0"): 160, ("w1", "w2"): 999}
SIZES = dict.fromkeys(("w0", "w1", "w2"), 16)
RULES = SettleRules(threshold_tokens=32, interval_s=0.1, valid_for_s=0.5)


class Worker:
    """Does what it is asked, up to a phase."""

    def __init__(self, fails_at: SettlePhase | None = None) -> None:
        self.fails_at = fails_at
        self.asked: list[tuple[SettlePhase, int]] = []

    async def settle(self, asked: Settle) -> Settled:
        self.asked.append((asked.phase, asked.blocks))
        if asked.phase is self.fails_at:
            raise CreditorLost("as told")
        return Settled(
            settlement=asked.settlement,
            phase=asked.phase,
            round=asked.round,
            blocks=asked.blocks,
            bounce_blocks=6,
        )


async def make(connect_bus: ConnectBus, **workers: Worker) -> Settlements:
    for name, worker in workers.items():
        bus = await connect_bus("worker", name)
        await bus.attach(HANDLERS, worker)
    return Settlements(await connect_bus("ledger", "ledger-0"), RULES)


async def until_over(settlements: Settlements) -> None:
    async with asyncio.timeout(10):
        while settlements.core.running:
            await asyncio.sleep(0.01)


async def test_a_cycle_is_settled_in_rounds(connect_bus: ConnectBus) -> None:
    workers = {"w0": Worker(), "w1": Worker()}
    settlements = await make(connect_bus, **workers)
    settlements.on_tick(DEBTS, SIZES, 0.0)
    assert settlements.details()["settling"] == 1
    await until_over(settlements)
    copy, commit = SettlePhase.COPY, SettlePhase.COMMIT
    rounds = [(copy, 6), (commit, 6), (copy, 4), (commit, 4)]
    for worker in workers.values():
        assert worker.asked == [(SettlePhase.FREEZE, 10), *rounds, (SettlePhase.UNFREEZE, 0)]
    assert settlements.details() == {
        "settling": 0,
        "settlements": 1,
        "settlements_aborted": 0,
        "settled_tokens": 320,
    }
    await settlements.close()


async def test_a_refusal_and_a_silence_end_it_and_thaw_the_others(connect_bus: ConnectBus) -> None:
    refusing, other = Worker(SettlePhase.COPY), Worker()
    settlements = await make(connect_bus, w0=refusing, w1=other)
    settlements.on_tick(DEBTS, SIZES, 0.0)
    await until_over(settlements)
    assert [phase for phase, _ in other.asked] == [SettlePhase.FREEZE, SettlePhase.COPY, SettlePhase.UNFREEZE]
    assert settlements.details()["settlements_aborted"] == 1
    three = {("w1", "w2"): 64, ("w2", "w1"): 64}
    settlements.on_tick(three, SIZES, 9.0)  # nobody answers for w2
    await until_over(settlements)
    assert settlements.details()["settlements_aborted"] == 2
    await settlements.close()


async def test_a_ledger_that_ends_gives_up(connect_bus: ConnectBus) -> None:
    settlements = await make(connect_bus, w0=Worker())
    settlements.on_tick(DEBTS, SIZES, 0.0)
    async with asyncio.timeout(5):
        await settlements.close()
