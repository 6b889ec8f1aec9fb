"""Whom lending deals with in its own worker: the pool, who uses what was borrowed, and whose memory it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.worker.peers.lending.core.table import GrantKey
from shared.messages.lending import Grant


class Vault(Protocol):
    """The pool, as it can be used from the event loop."""

    async def lend(self, most_blocks: int, least_blocks: int, keep_blocks: int) -> list[int]:
        """See `lendable.lend`. Raises Overloaded."""
        ...

    async def readmit(self, blocks: Sequence[int]) -> None:
        """Lent blocks are back."""
        ...


class LoanUser(Protocol):
    """Who uses borrowed blocks. What it has is in use for `Debts`, whether anything is in it or not."""

    async def admit(self, grant: Grant, logical: Sequence[int]) -> bool:
        """These may be used from now on. False when their creditor cannot be reached."""
        ...

    def lose(self, logical: Sequence[int]) -> None:
        """These are gone, with their KV; unknown ones are not minded."""
        ...


class BlockBorrower(LoanUser, Protocol):
    """Who uses them for sequences."""

    def rename(self, grant: GrantKey, generation: int) -> None:
        """The grant has that generation now, at least."""
        ...

    async def retire(self, most_blocks: int, *, cached: bool = True) -> list[int]:
        """Up to so many that no sequence has are given up."""
        ...

    async def set_apart(self, logical: Sequence[int], most_blocks: int) -> list[int]:
        """Up to so many of these stay whose they are until `rejoin` or `swap_home`. Raises Overloaded."""
        ...

    def rejoin(self, logical: Sequence[int]) -> None:
        """Ends `set_apart`; unknown ones are not minded."""
        ...

    async def copy_home(self, pairs: Sequence[tuple[int, int]]) -> bool:
        """What is in borrowed blocks, into own ones; the originals count on. False when it failed."""
        ...

    async def swap_home(self, pairs: Sequence[tuple[int, int]]) -> list[int] | None:
        """Sequences use the own ones from now on; those nobody needs are returned. None when it failed."""
        ...

    async def recall(self, logical: Sequence[int], most_blocks: int, keep_blocks: int) -> list[int]:
        """Which of these are at home now, in memory that was free: up to so many in use."""
        ...


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose memory it is, and how much."""

    worker_id: str
    incarnation: int
    blocks: int
    """Of its device."""
    ids: int
    """Of its own blocks, wherever they are: all are below this."""
    block_tokens: int
    fingerprint: bytes
    host: str = ""
    host_blocks: int = 0
    """Of host memory, for others only."""
    host_attends: bool = True
    """It computes attention over them."""
    is_host_for_caches: bool = False
    """They are of use to other workers' prefix caches alone."""
