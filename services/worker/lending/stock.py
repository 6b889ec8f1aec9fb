"""What a worker lends out of: blocks of its device's pool, and blocks of host memory that is for others only.

The device's pool is the engine thread's (`Vault`); the host pool is this object's, on the event loop. Blocks
that cannot be handed back at the moment are kept and handed back later. Decides nothing.
"""

from collections.abc import Callable, Iterable, Sequence

from services.worker.kv.pool import BlockPool
from services.worker.lending.grants import Freed
from services.worker.lending.lendable import lend
from services.worker.lending.parties import Vault
from shared.errors import Overloaded
from shared.messages.lending import KvTier


class Stock:
    """Of one worker; `keep_blocks` of its device's free memory stay, of the host's none."""

    def __init__(self, device: Vault, keep_blocks: int, host_blocks: int, block_tokens: int) -> None:
        self._device = device
        self._keep_blocks = keep_blocks
        self.host = BlockPool(host_blocks, block_tokens) if host_blocks else None
        self._unreadmitted: list[int] = []

    @property
    def host_free_blocks(self) -> int:
        return 0 if self.host is None else self.host.free_blocks

    async def take(self, tier: KvTier, most_blocks: int, least_blocks: int) -> list[int]:
        """Up to `most_blocks` leave their pool, none where fewer than `least_blocks` could. Raises
        Overloaded."""
        if tier is KvTier.DEVICE:
            return await self._device.lend(most_blocks, least_blocks, self._keep_blocks)
        return [] if self.host is None else lend(self.host, most_blocks, least_blocks, 0)

    async def put_back(
        self, freed: Iterable[Freed], keep: Callable[[Sequence[int]], list[int]] = list
    ) -> None:
        """These are free here again. `keep` sees the device's first, and returns those it has no use for."""
        device: list[int] = []
        for part in freed:
            if part.tier is KvTier.DEVICE:
                device += part.blocks
            elif self.host is not None:
                self.host.readmit(part.blocks)
        self._unreadmitted += keep(device)
        if self._unreadmitted:
            blocks, self._unreadmitted = self._unreadmitted, []
            try:
                await self._device.readmit(blocks)
            except Overloaded:
                self._unreadmitted += blocks
