"""Takes blocks out of a worker's pools for a debtor, and puts them back. Pure: ids only.

Cached prefixes are evicted first.
"""

from collections.abc import Callable, Iterable, Sequence

from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.core.borrowed_pool import OwnPool
from services.worker.peers.lending.core.grants import Freed
from services.worker.peers.lending.core.interfaces import Vault
from shared.messages.lending import KvTier


class Stock:
    """Lendable memory of one worker. `keep_blocks` of the device stay free, none of the host."""

    def __init__(self, device: Vault, keep_blocks: int, host_blocks: int, block_tokens: int) -> None:
        self._device = device
        self._keep_blocks = keep_blocks
        self.host = BlockPool(host_blocks, block_tokens) if host_blocks else None

    @property
    def host_free_blocks(self) -> int:
        return 0 if self.host is None else self.host.free_blocks

    async def take(self, tier: KvTier, most_blocks: int, least_blocks: int) -> list[int]:
        """Take up to `most_blocks` out of a tier's pool, or none below `least_blocks`. Raises Overloaded."""
        if tier is KvTier.DEVICE:
            return await self._device.lend(most_blocks, least_blocks, self._keep_blocks)
        return [] if self.host is None else lend(self.host, most_blocks, least_blocks, 0)

    async def put_back(
        self, freed: Iterable[Freed], keep: Callable[[Sequence[int]], list[int]] = list
    ) -> None:
        """Put blocks back. `keep` gets the device blocks first, and returns those it does not need."""
        device: list[int] = []
        for part in freed:
            if part.tier is KvTier.DEVICE:
                device += part.blocks
            elif self.host is not None:
                self.host.readmit(part.blocks)
        if back := keep(device):
            await self._device.readmit(back)


def lend(pool: OwnPool, most_blocks: int, least_blocks: int, keep_blocks: int) -> list[int]:
    """Withdraw up to `most_blocks`, or none below `least_blocks`; `keep_blocks` stay free.

    Returns their places in the engine's memory."""
    blocks = min(
        most_blocks, pool.free_blocks + pool.evictable_blocks - keep_blocks, pool.base.lendable_blocks
    )
    if blocks < max(1, least_blocks):
        return []
    return pool.withdraw(pool.allocate(blocks))
