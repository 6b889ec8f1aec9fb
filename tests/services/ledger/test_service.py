"""The ledger over a real bus: creditors for debtors, and settlements, with silent workers and a ledger that
stops."""

import asyncio
from typing import Any

from services.ledger.config import LedgerConfig
from services.ledger.core.dgfm.coordinator import SettleRules
from services.ledger.service import HANDLERS, Ledger, Settlements
from shared import subjects
from shared.bus import Endpoint, Handler
from shared.errors import CreditorLost
from shared.messages.base import Empty
from shared.messages.commands import CreditorCandidates, FindCreditors
from shared.messages.lending import Settle, Settled, SettlePhase
from shared.messages.reports import ServiceStatus
from tests.conftest import ConnectBus
from tests.patience import PATIENCE_S, until
from tests.services.ledger.builders import promised_to, report


async def test_the_ledger_answers_from_heartbeats(connect_bus: ConnectBus) -> None:
    bus = await connect_bus("ledger", "ledger-0")
    await bus.attach(HANDLERS, Ledger(bus, LedgerConfig()))
    client = await connect_bus("worker", "w0")

    async def ask(*refused_by: str) -> list[tuple[str, int, int]]:
        question = FindCreditors(debtor_id="w0", tokens=64, refused_by=refused_by)
        subject = subjects.ledger_candidates("w0")
        answer = await client.request(subject, question, CreditorCandidates, deadline_s=5.0)
        return [(c.worker_id, c.free_tokens, c.distance) for c in answer.candidates]

    assert await ask() == []
    await client.publish(subjects.worker_reported("w0"), report("w0", free=0, host="a"))
    await client.publish(subjects.worker_reported("w1"), report("w1", free=4, host="a", lent_to={"w0": 2}))
    await client.publish(subjects.worker_reported("w2"), report("w2", free=9, host="b"))
    for _ in range(500):
        if len(await ask()) == 2:
            break
        await asyncio.sleep(0.01)
    assert await ask() == [("w1", 64, 0), ("w2", 144, 1)] and await ask("w1") == [("w2", 144, 1)]
    (status,) = await client.gather(
        subjects.status("ledger"), Empty(), ServiceStatus, deadline_s=5.0, expected=1
    )
    assert [row["free"] for row in status.details["tokens"]] == [0, 64, 144]
    assert status.details["tokens"][1]["lent_to"] == {"w0": 32}


async def test_several_ledgers_answer_and_spread_debtors_together(connect_bus: ConnectBus) -> None:
    tables = []
    for name in ("ledger-0", "ledger-1"):
        bus = await connect_bus("ledger", name)
        ledger = Ledger(bus, LedgerConfig(instance=name))
        await bus.attach(HANDLERS, ledger)
        tables.append(ledger)
    client = await connect_bus("worker", "w0")
    for worker in ("w1", "w2", "w3"):
        await client.publish(subjects.worker_reported(worker), report(worker, free=10))
    await until(lambda: all(len(ledger.table.accounts) == 3 for ledger in tables))

    async def first_for(debtor: str) -> str:
        question = FindCreditors(debtor_id=debtor, tokens=160)
        subject = subjects.ledger_candidates(debtor)
        answer = await client.request(subject, question, CreditorCandidates, deadline_s=5.0)
        creditor = answer.candidates[0].worker_id
        await until(lambda: all(debtor in promised_to(ledger.table, creditor) for ledger in tables))
        return creditor

    assert sorted([await first_for(f"d{number}") for number in range(3)]) == ["w1", "w2", "w3"]
    for _ in range(20):
        await first_for("d0")
    assert all(ledger.asked > 0 for ledger in tables), "both serve"


WORKER_HANDLERS: tuple[Handler, ...] = (Endpoint(subjects.worker_settle, Settle, "settle"),)
DEBTS = {("w0", "w1"): 160, ("w1", "w0"): 160, ("w1", "w2"): 999}
SIZES = dict.fromkeys(("w0", "w1", "w2"), 16)
RULES = SettleRules(threshold_tokens=32, interval_s=0.1, valid_for_s=0.5)


class Worker:
    """A worker that answers until a phase."""

    def __init__(self, fails_at: SettlePhase | None = None) -> None:
        self.fails_at = fails_at
        self.asked: list[tuple[SettlePhase, int]] = []

    async def settle(self, asked: Settle) -> Settled:
        self.asked.append((asked.phase, asked.blocks))
        if asked.phase is self.fails_at:
            raise CreditorLost("as told")
        same: dict[str, Any] = {name: getattr(asked, name) for name in ("settlement", "phase", "round")}
        return Settled(blocks=asked.blocks, bounce_blocks=6, **same)


async def make(connect_bus: ConnectBus, **workers: Worker) -> Settlements:
    for name, worker in workers.items():
        bus = await connect_bus("worker", name)
        await bus.attach(WORKER_HANDLERS, worker)
    return Settlements(await connect_bus("ledger", "ledger-0"), RULES)


async def until_over(settlements: Settlements) -> None:
    async with asyncio.timeout(PATIENCE_S):
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
    done = {"settlements": 1, "settled_tokens": 320}
    assert settlements.details() == {"settling": 0, "settlements_aborted": 0, **done}
    await settlements.close()


async def test_a_refusal_or_silence_ends_a_settlement_and_thaws_the_others(connect_bus: ConnectBus) -> None:
    refusing, other = Worker(SettlePhase.COPY), Worker()
    settlements = await make(connect_bus, w0=refusing, w1=other)
    settlements.on_tick(DEBTS, SIZES, 0.0)
    await until_over(settlements)
    assert [phase for phase, _ in other.asked] == [SettlePhase.FREEZE, SettlePhase.COPY, SettlePhase.UNFREEZE]
    assert settlements.details()["settlements_aborted"] == 1
    three = {("w1", "w2"): 64, ("w2", "w1"): 64}
    settlements.on_tick(three, SIZES, 9.0)  # w2 does not answer.
    await until_over(settlements)
    assert settlements.details()["settlements_aborted"] == 2
    await settlements.close()


async def test_a_ledger_that_stops_gives_up_settlements(connect_bus: ConnectBus) -> None:
    settlements = await make(connect_bus, w0=Worker())
    settlements.on_tick(DEBTS, SIZES, 0.0)
    async with asyncio.timeout(PATIENCE_S):
        await settlements.close()
