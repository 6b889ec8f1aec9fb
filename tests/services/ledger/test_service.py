"""The ledger over a real bus."""

import asyncio
from collections.abc import Callable

from services.ledger.config import LedgerConfig
from services.ledger.service import HANDLERS, Ledger
from shared import subjects
from shared.messages.base import Empty
from shared.messages.commands import CreditorCandidates, FindCreditors
from shared.messages.reports import ServiceStatus
from tests.conftest import ConnectBus
from tests.services.ledger.core.test_debt_ledger import report


async def test_answers_from_heartbeats(connect_bus: ConnectBus) -> None:
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
    assert await ask() == [("w1", 64, 0), ("w2", 144, 1)]
    assert await ask("w1") == [("w2", 144, 1)]
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
    await until(lambda: all(len(ledger.table) == 3 for ledger in tables))

    async def first_for(debtor: str) -> str:
        question = FindCreditors(debtor_id=debtor, tokens=160)
        subject = subjects.ledger_candidates(debtor)
        answer = await client.request(subject, question, CreditorCandidates, deadline_s=5.0)
        creditor = answer.candidates[0].worker_id
        await until(lambda: all(debtor in ledger.table.promises_of(creditor) for ledger in tables))
        return creditor

    assert sorted([await first_for(f"d{number}") for number in range(3)]) == ["w1", "w2", "w3"]
    for _ in range(20):
        await first_for("d0")
    assert all(ledger.asked > 0 for ledger in tables), "both serve"


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to that within 5 s")
