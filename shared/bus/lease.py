"""A lease on a role, in a file-backed JetStream key-value bucket, by compare-and-set.

The key is the role, the value its holder. A holder is silent when the key's revision has not moved for
`ttl_s` on the *observer's* monotonic clock; clocks are never compared, and time during which the observer
itself could not see counts for nothing. The revision at acquisition is the lease's epoch: it only ever grows,
also over restarts of the server.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import nats.errors
import nats.js.errors
from nats.js.api import StorageType
from nats.js.kv import KeyValue

from shared import subjects
from shared.bus.link import Link
from shared.clock import monotonic_s
from shared.errors import BusUnavailable, DeadlineExceeded, InvalidMessage, KvasirError, NotLeader
from shared.messages.base import Message, decode, encode
from shared.messages.values import Number, OptionalId

_log = logging.getLogger("kvasir.bus.lease")
_CALL_TIMEOUT_S = 2.0

T = TypeVar("T")


class LeaseHolder(Message, frozen=True, kw_only=True):
    """The value under a role. An empty instance: the role was given back."""

    instance: OptionalId
    incarnation: Number


@dataclass(frozen=True)
class _Entry:
    holder: LeaseHolder
    revision: int


class LeaseStore:
    """The bucket, with nats-py's errors turned into ours. Knows nothing of time."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def read(self, role: str) -> _Entry | None:
        """None when nobody ever held the role."""
        return await self._call(self._read(role))

    async def write(self, role: str, holder: LeaseHolder, *, last: int) -> int | None:
        """The new revision; None when the key's revision is not `last` (0: the key does not exist)."""
        return await self._call(self._write(role, encode(holder), last))

    async def _read(self, role: str) -> _Entry | None:
        bucket = await self._bucket()
        try:
            entry = await bucket.get(role)
        except nats.js.errors.KeyNotFoundError:
            return None
        return _Entry(_holder_in(entry.value or b""), entry.revision or 0)

    async def _write(self, role: str, value: bytes, last: int) -> int | None:
        bucket = await self._bucket()
        try:
            return await bucket.update(role, value, last=last)
        except nats.js.errors.KeyWrongLastSequenceError:
            return None

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Raises BusUnavailable (also when the connection is lost meanwhile), DeadlineExceeded, and
        PermissionRefused when leases are not for this user."""
        try:
            return await self._link.unless_lost(work, publishes=("$JS.API.", "$KV."))
        except (nats.errors.NoRespondersError, nats.js.errors.ServiceUnavailableError) as error:
            raise BusUnavailable("JetStream does not answer: is it enabled in nats-server?") from error
        except (nats.errors.TimeoutError, TimeoutError) as error:
            raise DeadlineExceeded(f"JetStream did not answer within {_CALL_TIMEOUT_S:g} s") from error
        except nats.errors.Error as error:
            raise BusUnavailable(f"JetStream: {error}") from error

    async def _bucket(self) -> KeyValue:
        """Made if it is not there: idempotent, and right also after the server lost its store."""
        context = self._link.client.jetstream(timeout=_CALL_TIMEOUT_S)
        try:
            return await context.key_value(subjects.LEASE_BUCKET)
        except nats.js.errors.BucketNotFoundError:
            return await context.create_key_value(
                bucket=subjects.LEASE_BUCKET, storage=StorageType.FILE, history=1
            )


class Lease:
    """A role that is held. `epoch` is fixed at acquisition."""

    def __init__(self, store: LeaseStore, role: str, holder: LeaseHolder, revision: int) -> None:
        self.role = role
        self.holder = holder
        self.epoch = revision
        self._revision = revision
        self._store = store

    async def renew(self) -> None:
        """Show that the holder lives; call it several times per `ttl_s`.

        Raises NotLeader when another took the role, BusUnavailable or DeadlineExceeded when that cannot be
        told now.
        """
        revision = await self._store.write(self.role, self.holder, last=self._revision)
        if revision is None:
            entry = await self._store.read(self.role)
            if entry is not None and entry.holder == self.holder:  # an earlier answer was lost, not the lease
                revision = await self._store.write(self.role, self.holder, last=entry.revision)
            if revision is None:
                taker = entry.holder.instance if entry else ""
                raise NotLeader(f"the role {self.role} is held by {taker or 'nobody'} now")
        self._revision = revision

    async def release(self) -> None:
        """Give the role back, so that a standby need not wait. Never raises a `KvasirError`."""
        try:
            await self._store.write(self.role, LeaseHolder(instance="", incarnation=0), last=self._revision)
        except KvasirError as error:
            _log.warning("the role %s was not given back: %s", self.role, error)


class Silence:
    """For how long an observer has seen a revision stand still. Knows no clock.

    What the observer slept through (a long gap between two looks) counts for little. A lost connection,
    during which the holder could not renew either, starts the count again.
    """

    def __init__(self, longest_gap_s: float) -> None:
        self._longest_gap_s = longest_gap_s
        self._seen: tuple[int, int] | None = None
        self._looked_s = 0.0
        self.lasting_s = 0.0

    def observe(self, revision: int, reconnections: int, now_s: float) -> None:
        """A look at the key: its revision, and how often the connection was lost so far."""
        seen = (revision, reconnections)
        if seen == self._seen:
            self.lasting_s += min(now_s - self._looked_s, self._longest_gap_s)
        else:
            self.lasting_s = 0.0
        self._seen, self._looked_s = seen, now_s


async def acquire(
    link: Link,
    role: str,
    *,
    instance: str,
    incarnation: int,
    ttl_s: float,
    is_new: bool = True,
    is_gone: Callable[[str, int], bool] = lambda instance, incarnation: False,
) -> Lease:
    """Wait until the role is this instance's.

    At once when it is free, given back, or, for a process that `is_new` (it has not stood for the role yet),
    held by an earlier start of the same instance, or by a start that `is_gone` from the bus; otherwise after
    `ttl_s` without a renewal. Waits for ever,
    as a standby must; cancel to stop. Raises PermissionRefused when leases are not for this user.
    """
    store = LeaseStore(link)
    holder = LeaseHolder(instance=instance, incarnation=incarnation)
    poll_s = min(0.25, ttl_s / 4)
    silence = Silence(longest_gap_s=2 * poll_s)
    while True:
        try:
            entry = await store.read(role)
            revision = entry.revision if entry else 0
            silence.observe(revision, link.reconnections, monotonic_s())
            if (
                entry is None
                or _is_takeable(entry.holder, holder, is_new=is_new)
                or is_gone(entry.holder.instance, entry.holder.incarnation)
                or silence.lasting_s >= ttl_s
            ):
                acquired = await store.write(role, holder, last=revision)
                if acquired is not None:
                    return Lease(store, role, holder, acquired)
        except (BusUnavailable, DeadlineExceeded) as error:
            _log.warning("cannot see who holds the role %s: %s", role, error)
        await asyncio.sleep(poll_s)


def _is_takeable(held_by: LeaseHolder, wanted_by: LeaseHolder, *, is_new: bool) -> bool:
    """Without waiting: given back, held by this process, or by another start of the same instance.

    That is an earlier one if this process has just started; to one that was frozen, it is a later one.
    """
    if not held_by.instance or held_by == wanted_by:
        return True
    return is_new and held_by.instance == wanted_by.instance


def _holder_in(value: bytes) -> LeaseHolder:
    """A value that is no holder's belongs to nobody we know: it has to fall silent."""
    try:
        return decode(value, LeaseHolder)
    except InvalidMessage:
        return LeaseHolder(instance="unknown", incarnation=0)
