"""Leases on roles, stored in a JetStream key-value bucket, with compare-and-set.

The key is the role, the value its holder. A lease expires when its key's revision does not change for `ttl_s`
on the *observer's* monotonic clock. Clocks are never compared, and time in which the observer was blind does
not count. The revision at acquisition is the lease's epoch.

A single server keeps the bucket in memory, and loses it when it dies. The revisions of a new bucket begin at
the Unix time in milliseconds, which earlier ones cannot have reached at a few renewals a second, so no epoch
is given twice. A leader also exceeds the workers' epochs, in case the clock was set back. A holder renews its
lease in a new bucket.

A cluster keeps up to three replicas in files: replicas in memory would begin at that time again after all
servers were restarted. Without a majority nobody takes or renews a lease. A new leader of the bucket is
elected in 4 to 9 s, for which a holder keeps its role (`Lease.patience_s`); nobody else can take it then.
Holders keep that leader on the server with fewest of them, so that no single death takes both.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import nats.errors
import nats.js.errors
from nats.js.api import StorageType, StreamConfig
from nats.js.kv import KeyValue

from shared import subjects
from shared.bus.link import Link
from shared.clock import monotonic_s, unix_s
from shared.errors import BusUnavailable, DeadlineExceeded, InvalidMessage, KvasirError, NotLeader
from shared.messages.base import Message, decode, encode
from shared.messages.values import Number, OptionalId, Text

_log = logging.getLogger("kvasir.bus.lease")
_CALL_TIMEOUT_S = 2.0
_STREAM = f"KV_{subjects.LEASE_BUCKET}"
_KEYS = f"$KV.{subjects.LEASE_BUCKET}."
_MOST_REPLICAS = 3
_ELECTION_S = 10.0
"""Longest time in which nats-server elects a leader among the replicas."""

T = TypeVar("T")


class LeaseHolder(Message, frozen=True, kw_only=True):
    """Value stored under a role. An empty instance means that the role was released."""

    instance: OptionalId
    incarnation: Number
    server: Text = ""
    """That it is connected to, in a cluster."""

    def is_same_as(self, other: "LeaseHolder") -> bool:
        return (self.instance, self.incarnation) == (other.instance, other.incarnation)


@dataclass(frozen=True)
class _Entry:
    holder: LeaseHolder
    revision: int


class LeaseStore:
    """The bucket, with nats-py's errors translated."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.replicas = min(link.servers, _MOST_REPLICAS)

    async def read(self, role: str) -> _Entry | None:
        """Return the entry, or None if the role was never held."""
        return await self._call(self._read(role))

    async def write(self, role: str, holder: LeaseHolder, *, last: int) -> int | None:
        """Return the new revision, or None if the current one is not `last` (0: no such key)."""
        if self.replicas > 1:
            holder = msgspec.structs.replace(holder, server=self._link.server_name)
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

    async def move_leader(self) -> None:
        """Move the leader of the replicas off this process's server, if another one has fewer holders."""
        if self.replicas > 1:
            await self._call(self._move_leader())

    async def _move_leader(self) -> None:
        client, own = self._link.client, self._link.server_name
        context = client.jetstream(timeout=_CALL_TIMEOUT_S)
        info = await context.stream_info(_STREAM, subjects_filter=f"{_KEYS}>")
        if info.cluster is None or info.cluster.leader != own:
            return
        holders = Counter[str]()
        for subject in info.state.subjects or ():
            entry = await self._read(subject.removeprefix(_KEYS))
            if entry and entry.holder.instance:
                holders[entry.holder.server] += 1
        others = [str(peer.name) for peer in info.cluster.replicas or () if peer.current]
        best = min(others, key=lambda name: holders[name], default=own)
        if holders[best] < holders[own]:
            where = json.dumps({"placement": {"preferred": best}}).encode()
            await client.request(f"$JS.API.STREAM.LEADER.STEPDOWN.{_STREAM}", where, timeout=_CALL_TIMEOUT_S)

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`. Raise BusUnavailable (also if the connection is lost), DeadlineExceeded, or
        PermissionRefused if this user may not use leases."""
        try:
            return await self._link.unless_lost(work, publishes=("$JS.API.", "$KV."))
        except (nats.errors.NoRespondersError, nats.js.errors.ServiceUnavailableError) as error:
            raise BusUnavailable("JetStream does not answer: is it enabled in nats-server?") from error
        except (nats.errors.TimeoutError, TimeoutError) as error:
            raise DeadlineExceeded(f"JetStream did not answer within {_CALL_TIMEOUT_S:g} s") from error
        except nats.errors.Error as error:
            raise BusUnavailable(f"JetStream: {error}") from error

    async def _bucket(self) -> KeyValue:
        """Return the bucket, creating it if missing. Works also after the server lost its store."""
        context = self._link.client.jetstream(timeout=_CALL_TIMEOUT_S)
        try:
            return await context.key_value(subjects.LEASE_BUCKET)
        except nats.js.errors.BucketNotFoundError:
            await context.add_stream(
                StreamConfig(
                    name=_STREAM,
                    subjects=[f"$KV.{subjects.LEASE_BUCKET}.>"],
                    storage=StorageType.FILE if self.replicas > 1 else StorageType.MEMORY,
                    num_replicas=self.replicas,
                    first_seq=int(unix_s() * 1000),
                    max_msgs_per_subject=1,
                )
            )
            return await context.key_value(subjects.LEASE_BUCKET)


class Lease:
    """A role held by this process. `epoch` is fixed at acquisition."""

    def __init__(self, store: LeaseStore, role: str, holder: LeaseHolder, revision: int) -> None:
        self.role = role
        self.holder = holder
        self.epoch = revision
        self._revision = revision
        self._store = store

    @property
    def patience_s(self) -> float:
        """Seconds beyond its time to live for which renewals may fail, because the bucket has no leader."""
        return _ELECTION_S if self._store.replicas > 1 else 0.0

    async def renew(self) -> None:
        """Renew the lease; call it several times per `ttl_s`. Raise NotLeader if another instance took the
        role. Raise BusUnavailable or DeadlineExceeded if the store does not answer."""
        await self._renew()
        try:
            await self._store.move_leader()
        except (BusUnavailable, DeadlineExceeded) as error:
            _log.warning("the bucket's leader may be on the same server as the role %s: %s", self.role, error)

    async def _renew(self) -> None:
        revision = await self._store.write(self.role, self.holder, last=self._revision)
        if revision is None:
            entry = await self._store.read(self.role)
            if entry is None:  # the server was restarted
                revision = await self._store.write(self.role, self.holder, last=0)
                entry = None if revision else await self._store.read(self.role)
            elif entry.holder.is_same_as(self.holder):  # only the earlier reply was lost
                revision = await self._store.write(self.role, self.holder, last=entry.revision)
            if revision is None:
                taker = entry.holder.instance if entry else ""
                raise NotLeader(f"the role {self.role} is held by {taker or 'nobody'} now")
        self._revision = revision

    async def release(self) -> None:
        """Release the role, so that a standby can take it at once. Never raise a `KvasirError`."""
        try:
            await self._store.write(self.role, LeaseHolder(instance="", incarnation=0), last=self._revision)
        except KvasirError as error:
            _log.warning("the role %s was not given back: %s", self.role, error)


class Silence:
    """Time for which an observer has seen an unchanged revision. Reads no clock. A long gap between two
    observations counts only up to `longest_gap_s`. A lost connection or a failed look restarts the count,
    because the holder could not renew either."""

    def __init__(self, longest_gap_s: float) -> None:
        self._longest_gap_s = longest_gap_s
        self._seen: tuple[int, int] | None = None
        self._looked_s = 0.0
        self.lasting_s = 0.0

    def restart(self) -> None:
        """Begin anew, after a failed look."""
        self._seen = None

    def observe(self, revision: int, reconnections: int, now_s: float) -> None:
        """Record the key's revision and the number of reconnections at `now_s`."""
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
    patience_s: Callable[[], float] = lambda: 0.0,
) -> Lease:
    """Wait until this instance holds the role, without limit; cancel to stop.

    A role is taken at once if it is free or released, or if its holder left the bus (`is_gone`). The same
    goes for a holder that is an earlier run of this instance, if `is_new`: this process has not tried before.
    Otherwise the lease must go `ttl_s` without renewal; so must one that vanished with its server, since its
    holder may live. Others may take it first for `patience_s` after its last change. Raise PermissionRefused
    if this user may not use leases.
    """
    store = LeaseStore(link)
    holder = LeaseHolder(instance=instance, incarnation=incarnation)
    poll_s = min(0.25, ttl_s / 4)
    silence = Silence(longest_gap_s=2 * poll_s)
    has_seen = False
    while True:
        try:
            entry = await store.read(role)
            revision = entry.revision if entry else 0
            silence.observe(revision, link.reconnections, monotonic_s())
            if entry is None:
                is_free = not has_seen
            else:
                has_seen, held_by = True, entry.holder
                is_free = _is_takeable(held_by, holder, is_new=is_new)
                is_free = is_free or is_gone(held_by.instance, held_by.incarnation)
            if (is_free or silence.lasting_s >= ttl_s) and silence.lasting_s >= patience_s():
                acquired = await store.write(role, holder, last=revision)
                if acquired is not None:
                    return Lease(store, role, holder, acquired)
        except (BusUnavailable, DeadlineExceeded) as error:
            _log.warning("cannot see who holds the role %s: %s", role, error)
            silence.restart()
        await asyncio.sleep(poll_s)


def _is_takeable(held_by: LeaseHolder, wanted_by: LeaseHolder, *, is_new: bool) -> bool:
    """Return True if the role is released, held by this process, or by an earlier run of this instance. For a
    process that was frozen, the other run is a later one; `is_new` is then False."""
    if not held_by.instance or held_by.is_same_as(wanted_by):
        return True
    return is_new and held_by.instance == wanted_by.instance


def _holder_in(value: bytes) -> LeaseHolder:
    """Decode a holder. An invalid value counts as an unknown holder, whose lease must expire."""
    try:
        return decode(value, LeaseHolder)
    except InvalidMessage:
        return LeaseHolder(instance="unknown", incarnation=0)
