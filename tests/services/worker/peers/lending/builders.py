"""Builders of messages for tests of lending."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.worker.kv.core.block_pool import BlockPool
from services.worker.peers.lending.core.lendable_memory import lend
from shared.messages.lending import BorrowBlocks, Grant, HeldGrant, KvTier, RenewLeases, ReturnBlocks

KV = b"fingerprint"
"""Fingerprint of all KV in these tests."""


def borrow(
    debtor: str = "d",
    *,
    blocks: int = 4,
    request: int = 1,
    incarnation: int = 1,
    least: int = 1,
    tier: KvTier = KvTier.DEVICE,
    fingerprint: bytes = KV,
) -> BorrowBlocks:
    return BorrowBlocks(
        debtor_id=debtor,
        debtor_incarnation=incarnation,
        request=request,
        blocks=blocks,
        least_blocks=least,
        tier=tier,
        fingerprint=fingerprint,
    )


def grant(
    creditor: str = "c",
    *blocks: int,
    grant_id: int = 1,
    generation: int = 1,
    incarnation: int = 1,
    lease_s: float = 4.0,
    tier: KvTier = KvTier.DEVICE,
) -> Grant:
    return Grant(
        creditor_id=creditor,
        creditor_incarnation=incarnation,
        grant_id=grant_id,
        generation=generation,
        tier=tier,
        blocks=blocks or (7, 8, 9),
        lease_s=lease_s,
    )


def renew(
    debtor: str = "d", *grants: int, incarnation: int = 1, creditor_incarnation: int = 1
) -> RenewLeases:
    return RenewLeases(
        debtor_id=debtor,
        debtor_incarnation=incarnation,
        creditor_incarnation=creditor_incarnation,
        held=tuple(HeldGrant(grant_id=grant_id, generation=1) for grant_id in grants),
    )


def give_back(
    debtor: str, grant_id: int, *blocks: int, incarnation: int = 1, creditor_incarnation: int = 1
) -> ReturnBlocks:
    return ReturnBlocks(
        debtor_id=debtor,
        debtor_incarnation=incarnation,
        creditor_incarnation=creditor_incarnation,
        grant_id=grant_id,
        blocks=blocks,
    )


@dataclass
class PlainVault:
    """A pool on the loop's own thread."""

    pool: BlockPool = field(default_factory=lambda: BlockPool(BLOCKS, 16))

    async def lend(self, most_blocks: int, least_blocks: int, keep_blocks: int) -> list[int]:
        return lend(self.pool, most_blocks, least_blocks, keep_blocks)

    async def readmit(self, blocks: Sequence[int]) -> None:
        self.pool.readmit(blocks)


BLOCKS = 20
