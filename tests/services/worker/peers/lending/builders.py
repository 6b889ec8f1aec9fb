"""Builders for tests of lending: messages, a door without a thread, and a worker that lends."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, cast

from services.worker.core.settings import LendingConfig
from services.worker.core.steps import StepCore
from services.worker.door import Door
from services.worker.kv.core.block_pool import BlockPool
from services.worker.peers.core.neighbours import Neighbours
from services.worker.peers.lending.debtor import Owner
from services.worker.peers.lending.service import Lending
from shared import subjects
from shared.bus import Bus
from shared.clock import monotonic_s
from shared.messages.lending import BorrowBlocks, Grant, HeldGrant, KvTier, RenewLeases, ReturnBlocks
from shared.messages.reports import Capacity
from tests.shared.messages.builders import worker_report

KV = b"fingerprint"
"""Fingerprint of all KV in these tests."""
BLOCKS = 20
"""Of a worker."""


def borrow(debtor: str = "d", *, incarnation: int = 1, **fields: Any) -> BorrowBlocks:
    """Four blocks of the device, or one at least, but for what is named."""
    usual: dict[str, Any] = {
        "request": 1,
        "blocks": 4,
        "least_blocks": 1,
        "tier": KvTier.DEVICE,
        "fingerprint": KV,
    }
    return BorrowBlocks(debtor_id=debtor, debtor_incarnation=incarnation, **(usual | fields))


def grant(creditor: str = "c", *blocks: int, **fields: Any) -> Grant:
    usual: dict[str, Any] = {"creditor_incarnation": 1, "grant_id": 1, "generation": 1, "lease_s": 4.0}
    return Grant(creditor_id=creditor, blocks=blocks, **(usual | {"tier": KvTier.DEVICE} | fields))


def renew(debtor: str, *grants: int, incarnation: int = 1, creditor_incarnation: int = 1) -> RenewLeases:
    lives = {"debtor_incarnation": incarnation, "creditor_incarnation": creditor_incarnation}
    held = tuple(HeldGrant(grant_id=grant_id, generation=1) for grant_id in grants)
    return RenewLeases(debtor_id=debtor, held=held, **lives)


def give_back(debtor: str, grant_id: int, *blocks: int, incarnation: int = 1) -> ReturnBlocks:
    lives = {"debtor_incarnation": incarnation, "creditor_incarnation": 1}
    return ReturnBlocks(debtor_id=debtor, grant_id=grant_id, blocks=blocks, **lives)


class _AtOnce(SimpleQueue[Callable[[], None] | None]):
    def put(self, item: Callable[[], None] | None, *_: Any, **__: Any) -> None:
        if item is not None:
            item()


def open_door() -> Door:
    """A door that runs every call at once, on the caller's thread."""
    door = Door(cast(StepCore, None), monotonic_s, lambda _: None)
    door._waiting = _AtOnce()
    return door


class LendingWorker:
    """A worker's lending with heartbeats, on a bus of its own."""

    def __init__(
        self, bus: Bus, config: LendingConfig, *, host_blocks: int = 0, fingerprint: bytes = KV
    ) -> None:
        self.bus, self.fingerprint = bus, fingerprint
        self.pool = BlockPool(BLOCKS, 16)
        owner = Owner(bus.instance, bus.incarnation, BLOCKS, BLOCKS, 16, fingerprint, host_blocks=host_blocks)
        parts = open_door(), self.pool, Neighbours(bus.instance), itertools.count(1), monotonic_s
        self.lending = Lending(bus, config, owner, *parts)
        self.debts, self.grants = self.lending.debts, self.lending.grants
        self._tasks: Sequence[asyncio.Task[None]] = ()

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self.lending.serve()), asyncio.create_task(self._beat())]

    async def _beat(self) -> None:
        name, how = self.bus.instance, {"incarnation": self.bus.incarnation, "fingerprint": self.fingerprint}
        for seq in itertools.count(1):
            free, total = self.pool.free_blocks, self.pool.total_blocks
            capacity = Capacity(total_blocks=total, free_blocks=free, lent_blocks=self.pool.withdrawn_blocks)
            told = worker_report(name, seq=seq, **how, **self.lending.section(capacity))
            await self.bus.publish(subjects.worker_reported(name), told)
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Stop heartbeats and handlers."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def check(self) -> None:
        self.grants.check_integrity()
        self.debts.check_integrity()
