"""Borrowed blocks in use: from a grant to ids that sequences get, and back, or lost.

Stands between lending, on the event loop, and the engine's thread, which alone touches the pool, the homes of
blocks and the links. Decides nothing about how much is borrowed.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from services.worker.core.steps import StepCore
from services.worker.door import Door, EngineQuestion
from services.worker.kv.core.borrowed_pool import ExtendedPool
from services.worker.peers.attention.debtor import Debtor, Place
from services.worker.peers.attention.messages import GrantRef
from services.worker.peers.lending.core.table import GrantKey
from services.worker.peers.registry import Registry
from services.worker.peers.transport.base import PeerLink
from shared.errors import CreditorLost, KvasirError, Overloaded
from shared.log import get_logger
from shared.messages.lending import Grant, KvTier

Pair = tuple[int, int]
"""A borrowed block, and where in the own memory its KV goes: withdrawn, nobody else's."""


class Homecoming:
    """One debtor's. `forget`: these ids are borrowed no more."""

    def __init__(self, debtor: Debtor, pool: ExtendedPool, forget: Callable[[Iterable[int]], None]) -> None:
        self._debtor = debtor
        self._pool = pool
        self._forget = forget

    def copy(self, pairs: Sequence[Pair]) -> int:
        """Of those that a sequence uses; how many. Raises CreditorLost."""
        used = self._used(pairs)
        placed = zip(self._places(used), used, strict=True)
        self._debtor.watch.restart({place: own for place, (_, own) in placed})
        self._debtor.bring_home(used)
        return len(used)

    def swap(self, pairs: Sequence[Pair]) -> list[int]:
        """Returns own places that nobody needs: still withdrawn. Raises CreditorLost, and swaps nothing."""
        used, watch = self._used(pairs), self._debtor.watch
        placed = zip(self._places(used), used, strict=True)
        self._debtor.bring_home([pair for place, pair in placed if not watch.is_copy(place, pair[1])])
        watch.restart({})
        spare = self._pool.come_home(pairs)
        self._forget([there for there, _ in pairs])
        return spare

    def recall(self, blocks: Sequence[int], most_blocks: int, keep_blocks: int) -> list[int]:
        """Brings up to so many of these, in order, that a sequence uses into free own blocks, and leaves
        `keep_blocks` of those. Returns which. Raises CreditorLost: then all are whose they were."""
        own = self._pool.own
        room = min(own.free_blocks + own.evictable_blocks - keep_blocks, own.lendable_blocks)
        chosen = self._pool.set_apart(self._pool.are_used(blocks), min(most_blocks, room))
        if not chosen:
            return []
        home = own.withdraw(own.allocate(len(chosen)))
        self._debtor.watch.restart({})
        try:
            spare = self.swap(list(zip(chosen, home, strict=True)))
        except BaseException:
            own.readmit(home)
            self._pool.rejoin(chosen)  # Also those of creditors that live: nobody else would ever do it.
            raise
        own.readmit(spare)
        return chosen

    def _used(self, pairs: Sequence[Pair]) -> list[Pair]:
        used = set(self._pool.are_used([there for there, _ in pairs]))
        return [pair for pair in pairs if pair[0] in used]

    def _places(self, pairs: Sequence[Pair]) -> list[Place]:
        holders, blocks = self._debtor.homes.locate([there for there, _ in pairs])
        return list(zip(holders.tolist(), blocks.tolist(), strict=True))


Lender = tuple[str, int, KvTier]
"""A creditor's worker id and incarnation, and which memory of its."""

T = TypeVar("T")
_log = get_logger("worker.borrower")


@dataclass(slots=True)
class _Held:
    """A grant, as the engine's thread knows it."""

    generation: int
    blocks: int = 0


class Borrower:
    """One worker's borrowed blocks, in use. What goes to the engine's thread goes by its `door`: what changes
    hands there is not withdrawn half way, whoever stops waiting. `on_failed` is called, on that thread, with
    a creditor that failed in a step."""

    def __init__(
        self,
        debtor: Debtor,
        pool: ExtendedPool,
        door: Door,
        registry: Registry,
        on_failed: Callable[[str], None],
    ) -> None:
        self._debtor = debtor
        self._pool = pool
        self._door = door
        self._registry = registry
        self._on_failed = on_failed
        self._homecoming = Homecoming(debtor, pool, self._forget)
        self._holders: dict[Lender, int] = {}
        self._of_block: dict[int, tuple[Lender, int]] = {}
        """Lender and grant."""
        self._grants: dict[Lender, dict[int, _Held]] = {}
        """Those that have blocks here: named with every message."""

    # On the event loop

    async def admit(self, grant: Grant, logical: Sequence[int]) -> bool:
        """Blocks of a grant may be used from now on. False when their creditor cannot be reached, or too many
        lend already."""
        lender = (grant.creditor_id, grant.creditor_incarnation, grant.tier)
        link: PeerLink | None = None
        if lender not in self._holders:
            try:
                link = await self._registry.dial(grant.creditor_id, grant.creditor_incarnation)
            except KvasirError as error:
                _log.warning("blocks of %s cannot be used: %s", grant.creditor_id, error)
                return False
        return await self._give(lambda core, _: self._enter(lender, link, grant, logical))

    def rename(self, grant: GrantKey, generation: int) -> None:
        """The grant has that generation now, at least."""

        def rename(core: StepCore, now_s: float) -> None:
            for lender, held in self._grants.items():
                if lender[:2] == (grant.creditor_id, grant.creditor_incarnation) and grant.grant_id in held:
                    named = held[grant.grant_id]
                    named.generation = max(generation, named.generation)
                    self._name_grants(lender)

        self._door.give(rename)

    async def retire(self, most_blocks: int, *, cached: bool = True) -> list[int]:
        """Up to so many that no sequence has are given up; what is cached there only where it says so."""
        return await self._give(lambda core, _: self._retire(most_blocks, cached=cached))

    async def set_apart(self, logical: Sequence[int], most_blocks: int) -> list[int]:
        """Up to so many of these stay whose they are until `rejoin` or `swap_home`. Raises Overloaded."""
        return await self._door.take(
            lambda core, _: self._pool.set_apart(logical, most_blocks), self._pool.rejoin
        )

    def rejoin(self, logical: Sequence[int]) -> None:
        """Ends `set_apart`."""
        self._door.give(lambda core, _: self._pool.rejoin(logical))

    async def copy_home(self, pairs: Sequence[Pair]) -> bool:
        """Into own, withdrawn blocks; the originals count on. False when a creditor failed. Raises
        Overloaded."""
        copy = self._home(lambda: self._homecoming.copy(pairs))
        return await asyncio.wrap_future(self._door.ask(copy)) is not None

    async def swap_home(self, pairs: Sequence[Pair]) -> list[int] | None:
        """Sequences use the copies from now on. Own blocks that nobody needs; None when a creditor failed."""
        return await self._give(self._home(lambda: self._homecoming.swap(pairs)))

    async def recall(self, logical: Sequence[int], most_blocks: int, keep_blocks: int) -> list[int]:
        """Which of these, of up to so many in use, are at home now, in own blocks that were free."""
        recall = self._homecoming.recall
        return await self._give(self._home(lambda: recall(logical, most_blocks, keep_blocks))) or []

    def lose(self, logical: Sequence[int]) -> None:
        """Their leases are over, or their creditor forgot them."""

        def forget(core: StepCore, now_s: float) -> None:
            self._forget(logical)
            core.on_kv_lost(logical, now_s)  # The ends are reported with the next step or tick.

        self._door.give(forget)

    def close(self) -> None:
        """Every link, when the engine's thread has ended."""
        self._debtor.close()

    async def _give(self, question: EngineQuestion[T]) -> T:
        return await asyncio.wrap_future(self._door.give(question))

    def _home(self, bring: Callable[[], T]) -> EngineQuestion[T | None]:
        def run(core: StepCore, now_s: float) -> T | None:
            try:
                return bring()
            except CreditorLost as error:
                core.on_kv_lost(self.lose_creditor(error), now_s)
                return None

        return run

    # On the engine's thread

    def read(self, core: StepCore, now_s: float, blocks: Sequence[int], rows: npt.NDArray[np.uint8]) -> int:
        """Their bytes, of all layers, into `rows` `[n, record_bytes]`; of how many: none where a creditor
        failed."""

        def copy() -> int:
            self._debtor.read(blocks, rows)
            return len(blocks)

        return self._home(copy)(core, now_s) or 0

    def lose_creditor(self, error: CreditorLost) -> set[int]:
        """It failed in the middle of a step: which blocks are gone."""
        gone = {block for block, (lender, _) in self._of_block.items() if lender[0] == error.creditor_id}
        self._forget(gone)
        self._on_failed(error.creditor_id)
        return gone

    def _enter(self, lender: Lender, link: PeerLink | None, grant: Grant, logical: Sequence[int]) -> bool:
        holder = self._holders.get(lender)
        if holder is None:
            if link is None:
                return False
            try:
                holder = self._debtor.add(link, (), grant.tier, attends=grant.attends)
            except Overloaded as error:
                _log.warning("blocks of %s cannot be used: %s", grant.creditor_id, error)
                link.close()
                return False
            self._holders[lender] = holder
        elif link is not None:
            link.close()
        self._of_block.update(dict.fromkeys(logical, (lender, grant.grant_id)))
        held = self._grants.setdefault(lender, {}).setdefault(grant.grant_id, _Held(grant.generation))
        held.blocks += len(logical)
        self._debtor.homes.place(logical, holder, grant.blocks)
        self._name_grants(lender)
        self._pool.admit(logical)
        return True

    def _retire(self, most_blocks: int, *, cached: bool) -> list[int]:
        retired = self._pool.retire(most_blocks, cached=cached)
        self._forget(retired)
        return retired

    def _forget(self, blocks: Iterable[int]) -> None:
        lenders: set[Lender] = set()
        for block in list(blocks):
            lender, grant_id = self._of_block.pop(block, (None, 0))
            if lender is None:
                continue
            self._debtor.homes.forget([block])
            lenders.add(lender)
            held = self._grants[lender][grant_id]
            held.blocks -= 1
            if not held.blocks:
                del self._grants[lender][grant_id]
        for lender in lenders:
            self._name_grants(lender)

    def _name_grants(self, lender: Lender) -> None:
        """A grant without blocks here may end there, and must not be named any more."""
        refs = [GrantRef(grant_id, held.generation) for grant_id, held in self._grants[lender].items()]
        if refs:
            self._debtor.set_grants(self._holders[lender], refs)
        else:
            del self._grants[lender]
            self._debtor.remove(self._holders.pop(lender))
