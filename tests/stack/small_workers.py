"""Settings of small workers that lend each other all they have, and everything that they report."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from shared import subjects
from shared.bus import Bus, Handler, Listener
from shared.messages.reports import WorkerReported
from tests.patience import STACK_PATIENCE_S
from tests.stack.running import RunningStack
from tests.stack.watch import bus_access

BLOCKS, BLOCK_TOKENS, WORKERS = 40, 16, 4
OWN_TOKENS = BLOCKS * BLOCK_TOKENS
LEASE_S, GRACE_S = 3.0, 0.5
STAGED_BLOCKS = 4
"""Of a borrower's own KV: stagings for eight creditors, of one of eight layers."""

SETTINGS = (
    f"worker.kv_blocks={BLOCKS}",
    "worker.prefix_cache.enabled=false",
    "worker.pie.enabled=false",  # own host memory would go first
    "worker.lending.borrow=true",
    "worker.lending.max_lent_fraction=1.0",
    "worker.lending.keep_free_fraction=0.0",
    "worker.lending.low_fraction=0.0",
    "worker.lending.high_fraction=0.0",
    "worker.lending.rest_s=0.1",
    "worker.lending.bounce_blocks=1",
    f"worker.lending.lease_s={LEASE_S}",
    f"worker.lending.grace_s={GRACE_S}",
)


class Heartbeats:
    """Every worker's, all of them."""

    HANDLERS: tuple[Handler, ...] = (Listener(subjects.ANY_WORKER_REPORTED, WorkerReported, "on_reported"),)

    def __init__(self) -> None:
        self.reports: list[WorkerReported] = []

    def on_reported(self, report: WorkerReported) -> None:
        self.reports.append(report)


@asynccontextmanager
async def heartbeats(stack: RunningStack) -> AsyncIterator[Heartbeats]:
    bus = await Bus.connect(bus_access(stack).config("ledger-0"), service="ledger", instance="ledger-test")
    heard = Heartbeats()
    try:
        await bus.attach(Heartbeats.HANDLERS, heard)
        yield heard
    finally:
        await bus.close()


async def announced_tokens(stack: RunningStack) -> int:
    """The context limit that the gateway tells clients."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=30) as http:
        reply = await http.get("/v1/models", headers={"Authorization": f"Bearer {stack.key}"})
        return max(int(row.get("max_model_len") or 0) for row in reply.json()["data"])


async def until_announced(stack: RunningStack, tokens: float) -> None:
    """Until all workers are known to lend, so that requests may be so long."""
    async with asyncio.timeout(STACK_PATIENCE_S):
        while await announced_tokens(stack) < tokens:
            await asyncio.sleep(0.1)
