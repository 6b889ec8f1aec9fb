"""Lending between real processes that are killed and frozen: a debtor, the ledger."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from tests.patience import BUSY_S
from tests.stack.client import Question
from tests.stack.prompts import mixed
from tests.stack.running import RunningStack, running_stack
from tests.stack.watch import Seen, debtor_of, lent, nobody_owes, watching
from tests.tasks import running

pytestmark = pytest.mark.stack
KV_BLOCKS, STAGED_BLOCKS, LEASE_S, GRACE_S, REST_S, BEAT_S = 128, 4, 3.0, 0.5, 0.1, 0.25
BLOCKS = KV_BLOCKS - STAGED_BLOCKS
"""Stagings for what creditors send come out of a borrower's own KV."""
BOUNCE_BLOCKS = 2
"""Of its own, too, kept to swap debts through."""
SETTINGS = (
    f"worker.kv_blocks={KV_BLOCKS}",
    "worker.prefix_cache.enabled=false",
    "worker.pie.enabled=false",  # own host memory would go first
    "worker.lending.borrow=true",
    "worker.lending.low_fraction=0.9",
    "worker.lending.high_fraction=0.95",
    f"worker.lending.lease_s={LEASE_S}",
    f"worker.lending.grace_s={GRACE_S}",
    f"worker.lending.rest_s={REST_S}",
    f"worker.lending.bounce_blocks={BOUNCE_BLOCKS}",
)


@pytest.fixture(scope="module")
def lenders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with running_stack(tmp_path_factory.mktemp("lending") / "run", settings=SETTINGS) as running:
        yield running


@asynccontextmanager
async def long_answers(stack: RunningStack) -> AsyncIterator[None]:
    """One after the other, so that whoever computes them has little left most of the time."""
    question = Question(mixed(1, longest_words=120, seed=3)[0], {"max_tokens": 900, "ignore_eos": True})

    async def keep_on() -> None:
        while True:
            await stack.client().ask_all([question])

    async with running(keep_on()):
        yield


def all_free(seen: Seen) -> bool:
    return len(seen) == 2 and all(row["free_blocks"] == BLOCKS - BOUNCE_BLOCKS for row in seen.values())


async def test_lent_blocks_leave_the_pool_and_come_back(lenders: RunningStack) -> None:
    own: set[int] = set()

    def is_lent(seen: Seen) -> bool:
        """`own`: at every moment that is seen."""
        own.update(r["total_blocks"] + r["withdrawn_blocks"] - r["admitted_blocks"] for r in seen.values())
        return debtor_of(seen) is not None

    def is_back(seen: Seen) -> bool:
        is_lent(seen)
        return nobody_owes(seen)

    async with watching(lenders) as watch:
        async with long_answers(lenders):
            await watch.until(is_lent)
        await watch.until(is_back)
        await watch.until(all_free)
    assert own == {BLOCKS}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_debtors_blocks_are_free_within_the_lease(lenders: RunningStack, how: signal.Signals) -> None:
    found: list[str] = []

    def has_debtor(seen: Seen) -> bool:
        found[:] = [name for name in [debtor_of(seen)] if name]
        return bool(found)

    async with watching(lenders) as watch:
        async with long_answers(lenders):
            await watch.until(has_debtor)
            lenders.signal(found[0], how)
        try:
            creditor = "worker-1" if found == ["worker-0"] else "worker-0"
            took_s = await watch.until(lambda seen: lent(seen, creditor) == 0)
        finally:
            lenders.signal(found[0], signal.SIGCONT)
        assert took_s <= LEASE_S + GRACE_S + BUSY_S
        await watch.until(nobody_owes)
        await watch.until(all_free)


async def test_a_restarted_ledger_serves_within_two_heartbeats(lenders: RunningStack) -> None:
    restarts = lenders.child("ledger-0")["restarts"]
    async with watching(lenders) as watch:
        await watch.until(nobody_owes)
        lenders.signal("ledger-0", signal.SIGKILL)
        async with long_answers(lenders):
            await watch.until(lambda seen: any(row["free_blocks"] < 0.8 * BLOCKS for row in seen.values()))
            while not await watch.ask("ledger", 1):
                await asyncio.sleep(0.02)
            took_s = await watch.until(lambda seen: debtor_of(seen) is not None)
    assert took_s <= 2 * BEAT_S + REST_S + BUSY_S
    await asyncio.to_thread(lenders.until_restarted, "ledger-0", restarts=restarts + 1)
