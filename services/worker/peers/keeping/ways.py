"""The debtor's side of cache loans: copies blocks to and from lent slots, on the copying threads.

Loads and stores run on two threads, so each creditor has one link for each. Both are dialled with its first
grant, and again after an idle link was closed. A creditor that does not answer has failed: `on_failed` is
called, and none of its slots is used again. A creditor that ended a grant loses only that grant.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

import msgspec
import numpy as np

from services.worker.kv.tiers.records import RecordRow
from services.worker.peers.keeping.keeper import KEEP, KEPT, LentSlot
from services.worker.peers.registry import Registry
from services.worker.peers.transport.base import bytes_of
from services.worker.peers.transport.link import PeerLink
from shared.errors import DeadlineExceeded, InvalidMessage, KvasirError, PeerLost, StaleEpoch
from shared.liveness import Start
from shared.log import get_logger

_log = get_logger("worker.keeping")
_PROFILES = 4
_DIAL_S = 5.0
"""Longer than the deadlines of a ticket and a dial together."""


@dataclass(frozen=True, slots=True)
class SlotPlace:
    """Location of a slot."""

    creditor: Start
    """Worker id and incarnation."""
    slot: LentSlot


class PeerWays:
    """`PeerMemory` of one worker.

    `on_failed` gets the creditor and the ended grant, None for all of its grants, on a copying thread."""

    def __init__(
        self,
        registry: Registry,
        loop: asyncio.AbstractEventLoop,
        answer_s: float,
        on_failed: Callable[[Start, int | None], None],
    ) -> None:
        """`answer_s`: time after which a silent creditor has failed."""
        self._registry = registry
        self._loop = loop
        self._answer_s = answer_s
        self._on_failed = on_failed
        self._lock = threading.Lock()
        self._places: dict[int, SlotPlace] = {}
        self._links: dict[tuple[str, Start], PeerLink] = {}
        """By kind of message and creditor."""
        self._is_closed = False

    # --- on the event loop

    async def reach(self, place: SlotPlace, record_bytes: int) -> float:
        """Dial both links to the slot's creditor, so that no load waits for a dial.

        Returns the seconds that one block takes, 0 for links that were open. Raises KvasirError."""
        creditor, block_s = place.creditor, 0.0
        if (KEPT, creditor) not in self._links:
            link = await self._registry.dial(*creditor)
            try:
                block_s = await asyncio.to_thread(self._timed, link, place, record_bytes)
            except BaseException:
                link.close()
                raise
            self._enter((KEPT, creditor), link)
        if (KEEP, creditor) not in self._links:
            self._enter((KEEP, creditor), await self._registry.dial(*creditor))
        return block_s

    def _timed(self, link: PeerLink, place: SlotPlace, record_bytes: int) -> float:
        """Return the shortest of some fetches of the slot, in seconds. Raises KvasirError."""
        row, best_s = np.empty(record_bytes, dtype=np.uint8), float("inf")
        for _ in range(_PROFILES):
            began_s = perf_counter()
            self._copy(link, KEPT, place, row)
            best_s = min(best_s, perf_counter() - began_s)
        return best_s

    def admit(self, places: Mapping[int, SlotPlace]) -> None:
        """Enter slots whose creditor is reached."""
        with self._lock:
            self._places.update(places)

    def forget(self, numbers: Iterable[int]) -> None:
        """Forget slots that are no longer lent, and close links to creditors without any."""
        with self._lock:
            for number in numbers:
                self._places.pop(number, None)
            creditors = {place.creditor for place in self._places.values()}
            unused = [key for key in self._links if key[1] not in creditors]
            links = [self._links.pop(key) for key in unused]
        for link in links:
            link.close()

    def close(self) -> None:
        """Close all links, which ends the waits on them. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._places.clear()
        self.forget(())

    # --- on the threads that copy

    def read(self, place: int, row: RecordRow) -> bool:
        return self._ask(KEPT, place, row)

    def write(self, place: int, row: RecordRow) -> bool:
        return self._ask(KEEP, place, row)

    def _ask(self, kind: str, number: int, row: RecordRow) -> bool:
        place = self._places.get(number)
        if place is None:
            return False
        try:
            link = self._links.get((kind, place.creditor))
            if link is not None and not link.closed:
                with suppress(PeerLost):  # It was idle, and turns out to be closed.
                    return self._copy(link, kind, place, row)
                if number not in self._places:
                    return False
            return self._copy(self._dial((kind, place.creditor)), kind, place, row)
        except StaleEpoch:
            self._fail(place, place.slot.grant_id)
        except KvasirError as error:
            _log.debug("%s at %s: %s", kind, place.creditor[0], error)
            self._fail(place, None)
        return False

    def _copy(self, link: PeerLink, kind: str, place: SlotPlace, row: RecordRow) -> bool:
        """Raises KvasirError."""
        header = msgspec.msgpack.encode(place.slot)
        brought, into = ([bytes_of(row)], ()) if kind == KEEP else ((), [bytes_of(row)])
        answer = link.ask(kind, header, brought, into=into, deadline_s=self._answer_s)
        if answer.buffers != len(into):
            raise InvalidMessage(f"{place.creditor[0]} answered without the block")
        return True

    def _dial(self, key: tuple[str, Start]) -> PeerLink:
        """Return a new link, dialled by the event loop. Raises KvasirError."""
        dialling = self._registry.dial(*key[1])
        try:
            future = asyncio.run_coroutine_threadsafe(dialling, self._loop)
        except RuntimeError:  # The loop has ended.
            dialling.close()
            raise PeerLost("this worker is shutting down") from None
        try:
            link = future.result(_DIAL_S)
        except (TimeoutError, concurrent.futures.CancelledError):
            future.cancel()
            raise DeadlineExceeded(f"no link within {_DIAL_S:g} s") from None
        self._enter(key, link)
        return link

    def _enter(self, key: tuple[str, Start], link: PeerLink) -> None:
        """Keep a new link. Raises PeerLost while this worker shuts down."""
        with self._lock:
            is_closed, before = self._is_closed, self._links.pop(key, None)
            if not is_closed:
                self._links[key] = link
        if before is not None:
            before.close()
        if is_closed:
            link.close()
            raise PeerLost("this worker is shutting down")

    def _fail(self, at: SlotPlace, grant_id: int | None) -> None:
        """Give up a creditor, or one grant of it."""
        with self._lock:
            gone = [
                number
                for number, place in self._places.items()
                if place.creditor == at.creditor and grant_id in (None, place.slot.grant_id)
            ]
        self.forget(gone)
        if gone and not self._is_closed:
            self._on_failed(at.creditor, grant_id)
