"""Lending's interfaces within its own worker: the pool, the users of borrowed blocks, and the owner of the
memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.worker.peers.lending.core.table import GrantKey
from shared.messages.lending import Grant


class Vault(Protocol):
    """The worker's pool, called from the event loop."""

    async def lend(self, most_blocks: int, least_blocks: int, keep_blocks: int) -> list[int]:
        """See `lendable_memory.lend`. Raises Overloaded."""
        ...

    async def readmit(self, blocks: Sequence[int]) -> None:
        """Put lent blocks back into the pool."""
        ...


class LoanUser(Protocol):
    """User of borrowed blocks. For `Debts`, all blocks that it admits are in use."""

    async def admit(self, grant: Grant, logical: Sequence[int]) -> bool:
        """Start to use blocks of a grant. False when their creditor cannot be reached."""
        ...

    def lose(self, logical: Sequence[int]) -> None:
        """Drop lost blocks; unknown ones are ignored."""
        ...


class BlockBorrower(LoanUser, Protocol):
    """User of borrowed blocks for sequences."""

    def rename(self, grant: GrantKey, generation: int) -> None:
        """Record a newer generation of a grant."""
        ...

    async def retire(self, most_blocks: int, *, cached: bool = True) -> list[int]:
        """Give up to `most_blocks` that no sequence uses; `cached`: cached ones too."""
        ...

    async def set_apart(self, logical: Sequence[int], most_blocks: int) -> list[int]:
        """Pin up to `most_blocks` of these in place until `rejoin` or `swap_home`. Raises Overloaded."""
        ...

    def rejoin(self, logical: Sequence[int]) -> None:
        """End `set_apart`; unknown blocks are ignored."""
        ...

    async def copy_home(self, pairs: Sequence[tuple[int, int]]) -> bool:
        """Copy borrowed blocks into own ones; the originals stay valid. False when it failed."""
        ...

    async def swap_home(self, pairs: Sequence[tuple[int, int]]) -> list[int] | None:
        """Switch sequences to the own blocks; return the unneeded ones. None when it failed."""
        ...

    async def recall(self, logical: Sequence[int], most_blocks: int, keep_blocks: int) -> list[int]:
        """Bring up to `most_blocks` in use home into free memory; return which."""
        ...


@dataclass(frozen=True, slots=True)
class Owner:
    """The worker that owns the memory, and how much it has."""

    worker_id: str
    incarnation: int
    blocks: int
    """Device blocks."""
    ids: int
    """Upper bound of its own block ids, in any memory."""
    block_tokens: int
    fingerprint: bytes
    host: str = ""
    host_blocks: int = 0
    """Host blocks, for other workers only."""
    host_attends: bool = True
    """It computes attention over its host blocks."""
    is_host_for_caches: bool = False
    """Its host blocks serve other workers' prefix caches only."""
