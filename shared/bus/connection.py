"""`Bus`: a service's connection to NATS. Publish, request, gather, serve a handler table, hold a lease. All
failures are `shared.errors`; every wait takes a deadline. Commands carry W3C trace context, events do not."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec
import nats.errors
import nats.micro
from nats.aio.msg import Msg
from nats.micro.service import Service
from prometheus_client import CollectorRegistry

from shared.bus import tracing
from shared.bus.counters import BusCounters
from shared.bus.departures import Departures, OnGone, connection_name
from shared.bus.express import Express, close_unwanted
from shared.bus.inbox import Gathering, Inbox, is_unserved, reply_in
from shared.bus.lease import Lease, acquire
from shared.bus.link import Link, heeded_cancellation
from shared.bus.serving import Handler, Listener, ServedEndpoint, ServedListener, handle_inline
from shared.config import BusConfig
from shared.errors import (
    BusUnavailable,
    DeadlineExceeded,
    KvasirError,
    MessageTooLarge,
    NoResponder,
    PermissionRefused,
)
from shared.liveness import new_incarnation
from shared.messages.base import encode
from shared.recorder import Recorder
from shared.release import VERSION
from shared.subjects import checked_id, inbox_prefix, micro_name

_VERDICT_S = 1.0
"""Timeout for a frozen server; the publication then counts as sent."""

_MAX_CLEARED = 4096


@dataclass(eq=False)
class _Trial:
    subject: str
    refused: bool = False


class Clearance:
    """Permissions of this bus user, as learnt from the server's refusals.

    NATS does not confirm a publication, and reports a refused one later. The first publication to a subject
    therefore waits one round trip, in which a refusal would arrive. Later ones do not wait, until a refusal
    or a new connection. nats-py spells refused subjects in lower case.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._cleared: set[str] = set()
        self._trials: list[_Trial] = []
        self._subscriptions: set[str] = set()

    async def publish(self, subject: str, data: bytes) -> None:
        """Publish, after a check if needed. Raise PermissionRefused, or the errors of `Link.send`."""
        if subject in self._cleared:
            await self._link.send(subject, data)
            return
        trial = _Trial(subject)
        self._trials.append(trial)
        try:
            await self._link.send(subject, data)
            settled = self._link.connected and await self._link.settle(_VERDICT_S)
        finally:
            self._trials.remove(trial)
        if trial.refused:
            raise publish_refused(subject)
        if settled:
            if len(self._cleared) >= _MAX_CLEARED:
                self._cleared.clear()
            self._cleared.add(subject)

    def begin_subscribing(self, subjects: set[str]) -> None:
        """Forget earlier refusals of these subjects."""
        self._subscriptions -= {subject.lower() for subject in subjects}

    def check_subscribed(self, subjects: set[str]) -> None:
        """Raise PermissionRefused if one of these was refused. Call it after a round trip."""
        refused = sorted(subject for subject in subjects if subject.lower() in self._subscriptions)
        if refused:
            raise PermissionRefused(
                f"the bus user may not subscribe to {', '.join(refused)}: allow it in NATS"
            )

    def on_refused(self, verb: str, subject: str) -> None:
        """Record a refusal; `verb` is "publish" or "subscription"."""
        if verb != "publish":
            self._subscriptions.add(subject)
            return
        self._cleared = {cleared for cleared in self._cleared if cleared.lower() != subject}
        for trial in self._trials:
            trial.refused |= trial.subject.lower() == subject

    def forget(self) -> None:
        """Start over on a new connection, whose permissions may differ."""
        self._cleared.clear()


def publish_refused(subject: str) -> PermissionRefused:
    """Return the error for a refused publication or request."""
    return PermissionRefused(f"the bus user may not publish to {subject}: allow it in NATS")


_log = logging.getLogger("kvasir.bus")
_HEADER_BYTES = 256
"""Room for trace context, which counts towards the server's payload limit."""

_PEERS_RECONNECT_S = 2.0
"""After a reconnection, a peer may be missing for this long because it has not reconnected yet."""

R = TypeVar("R", bound=msgspec.Struct)


class Bus:
    """Bus connection of one process. Create it with `connect`, end it with `close`."""

    def __init__(
        self, config: BusConfig, service: str, instance: str, registry: CollectorRegistry | None
    ) -> None:
        self.config = config
        self.service = service
        self.instance = checked_id(instance)
        self.incarnation = new_incarnation()
        self.recorder = Recorder(service, instance, self.incarnation)
        self._counters = BusCounters(registry)
        prefix = inbox_prefix(config.user or instance)
        self.departures = Departures()
        """Other instances that left; empty until `watch_departures`."""
        name = partial(connection_name, instance, self.incarnation)
        self._link = Link(config, name=name, inbox_prefix=prefix, counters=self._counters)
        self._clearance = Clearance(self._link)
        self._inbox = Inbox(prefix)
        self._served: list[ServedEndpoint | ServedListener] = []
        self._micro: Service | None = None
        self._roles: set[str] = set()
        """Roles that this process has tried to acquire."""
        self._closed = False
        self._link.on_open = self._on_open
        self._link.on_lost = self._on_lost
        self._link.on_regained = self._on_regained
        self._link.on_met = self.departures.forget
        self._link.on_refused = self._on_refused

    @classmethod
    async def connect(
        cls, config: BusConfig, *, service: str, instance: str, registry: CollectorRegistry | None = None
    ) -> "Bus":
        """Open a connection; the bus then reconnects indefinitely. Raise BusUnavailable after
        `config.connect_timeout_s`, or PermissionRefused if the user may not use this inbox."""
        bus = cls(config, service, instance, registry)
        await bus._link.open()
        try:
            bus._clearance.check_subscribed({bus._inbox.subject})
        except PermissionRefused:
            await bus.close()
            raise
        return bus

    @property
    def connected(self) -> bool:
        return self._link.connected

    @property
    def reconnections(self) -> int:
        """Number of times the connection was lost and regained."""
        return self._link.reconnections

    async def attach(self, handlers: Sequence[Handler], target: object) -> None:
        """Serve the table with `target`'s methods. Return once the server knows the subscriptions. Raise
        PermissionRefused if the bus user may not subscribe to a subject; none of the table is then served.
        Raise BusUnavailable without a connection."""
        fresh = [self._bind(handler, target) for handler in handlers]
        subjects = {served.subject for served in fresh}
        self._clearance.begin_subscribing(subjects)
        try:
            async with asyncio.timeout(self.config.connect_timeout_s):
                with heeded_cancellation():
                    async with self._link.subscribing:
                        await self._link.wait_connected()
                        for served in fresh:
                            await self._start(served)
                            self._served.append(served)
                        await self._link.barrier()
        except (TimeoutError, nats.errors.Error):
            raise BusUnavailable(f"NATS at {self.config.url} did not confirm the subscriptions") from None
        try:
            self._clearance.check_subscribed(subjects)
        except PermissionRefused as error:
            await self.detach(handlers, target)
            raise self._counted(error) from None

    async def detach(self, handlers: Sequence[Handler], target: object | None = None) -> None:
        """Stop serving these handlers, only those of `target` if given. Running calls get `drain_timeout_s`
        to finish."""
        leaving = [
            served
            for served in self._served
            if served.spec in handlers and (target is None or served.target is target)
        ]
        self._served = [served for served in self._served if served not in leaving]
        await asyncio.gather(*(served.stop(self.config.drain_timeout_s) for served in leaving))

    @asynccontextmanager
    async def served_within(self) -> AsyncIterator[None]:
        """Serve until the block ends. What comes later would begin tasks whose group has ended."""
        try:
            yield
        finally:
            self.departures.close()
            await self.detach([served.spec for served in self._served])

    async def publish(self, subject: str, message: msgspec.Struct) -> None:
        """Send an event. While disconnected, buffer it, up to `outbound_buffer_bytes`. Raise MessageTooLarge,
        PermissionRefused (the server refused it), or BusUnavailable (closed, or the buffer is full). The
        message is then not delivered."""
        data = self._encoded(subject, message, 0)
        await self._clearance.publish(subject, data)
        self._counters.sent(type(message)).inc()

    async def request(self, subject: str, message: msgspec.Struct, reply: type[R], *, deadline_s: float) -> R:
        """Send a command and return its reply. Raise DeadlineExceeded, NoResponder, MessageTooLarge,
        PermissionRefused, or the peer's `KvasirError`. Raise BusUnavailable if there is no connection, or if
        it is lost while waiting; the command may then have run."""
        try:
            data = self._encoded(subject, message, _HEADER_BYTES)
            self._counters.sent(type(message)).inc()
            async with asyncio.timeout(deadline_s):
                await self._link.wait_connected()
                while True:
                    msg = await self._ask(subject, data)
                    if not is_unserved(msg):
                        return reply_in(msg, reply)
                    if not self._link.regained_within(_PEERS_RECONNECT_S):
                        raise NoResponder(f"nobody serves {subject} now")
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise self._counted(self._too_late(subject, deadline_s)) from None
        except KvasirError as error:
            raise self._counted(error) from error.__cause__

    async def gather(
        self,
        subject: str,
        message: msgspec.Struct,
        reply: type[R],
        *,
        deadline_s: float,
        expected: int | None = None,
    ) -> list[R]:
        """Return the replies of all instances within the deadline, or the first `expected`; skip errors.
        Raise BusUnavailable, MessageTooLarge or PermissionRefused. Without any responder the list is
        empty."""
        data = self._encoded(subject, message, _HEADER_BYTES)
        answers = Gathering(reply, expected, self._counted)
        inbox = self._inbox.open(subject, answers.on_reply, answers.on_failure)
        try:
            async with asyncio.timeout(deadline_s):
                await self._link.wait_connected()
                await self._link.send(subject, data, inbox, tracing.inject())
                self._counters.sent(type(message)).inc()
                await answers.done
        except TimeoutError:
            if not self.connected:
                raise BusUnavailable(f"not connected to NATS at {self.config.url}") from None
        finally:
            self._inbox.close(inbox)
        return answers.replies

    async def express(self) -> Express:
        """Open a connection for one thread (`shared.bus.express`). Raise BusUnavailable."""
        config = self.config.model_copy(update={"url": self._link.url})  # both end together
        opening = asyncio.get_running_loop().run_in_executor(
            None, Express.connect, config, self.instance, self._counters
        )
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(close_unwanted)
            raise

    async def acquire_lease(
        self, role: str, *, ttl_s: float, patience_s: Callable[[], float] = lambda: 0.0
    ) -> Lease:
        """Wait without limit until this instance holds the role (`shared.bus.lease`)."""
        is_new = role not in self._roles
        self._roles.add(role)
        return await acquire(
            self._link,
            role,
            instance=self.instance,
            incarnation=self.incarnation,
            ttl_s=ttl_s,
            is_new=is_new,
            is_gone=self.departures.is_gone,
            patience_s=patience_s,
        )

    async def watch_departures(self, on_gone: OnGone) -> None:
        """Call `on_gone` for each instance run that leaves the bus, if nats-server announces departures.
        Raise BusUnavailable without a connection."""
        self.departures.watch(on_gone)
        try:
            await self.attach(Departures.HANDLERS, self.departures)
        except PermissionRefused as error:
            _log.warning("who leaves the bus is known by silence only: %s", error.message)

    async def close(self) -> None:
        """Stop serving, let running handlers finish within `drain_timeout_s`, and disconnect. Idempotent."""
        if self._closed:
            return
        async with self.served_within():
            self._closed = True
        self._inbox.fail(BusUnavailable("the bus is closed"))
        await self._link.close(self.config.drain_timeout_s)

    def _bind(self, handler: Handler, target: object) -> ServedEndpoint | ServedListener:
        if isinstance(handler, Listener):
            return ServedListener(handler, target, self.instance, self._counters, self._link)
        return ServedEndpoint(handler, target, self.instance, self._counters, self._link)

    async def _start(self, served: ServedEndpoint | ServedListener) -> None:
        client = self._link.client
        if isinstance(served, ServedEndpoint) and self._micro is None:
            metadata = {"instance": self.instance, "incarnation": str(self.incarnation)}
            self._micro = await nats.micro.add_service(
                client, name=micro_name(self.service), version=VERSION, metadata=metadata
            )
        await served.start(client, self._micro)

    async def _ask(self, subject: str, data: bytes) -> Msg:
        inbox, answer = self._inbox.open_one(subject)
        try:
            await self._link.send(subject, data, inbox, tracing.inject())
            return await answer
        finally:
            self._inbox.close(inbox)

    def _too_late(self, subject: str, deadline_s: float) -> KvasirError:
        if not self.connected:
            return BusUnavailable(f"not connected to NATS at {self.config.url}")
        return DeadlineExceeded(f"no answer on {subject} within {deadline_s:g} s")

    def _counted(self, error: KvasirError) -> KvasirError:
        self._counters.error("caller", error.code)
        return error

    def _encoded(self, subject: str, message: msgspec.Struct, header_bytes: int) -> bytes:
        data = encode(message)
        limit = self._link.max_payload_bytes - header_bytes
        if len(data) > limit:
            raise MessageTooLarge(
                f"a {type(message).__name__} of {len(data)} bytes for {subject} is over the limit of {limit}"
            )
        return data

    async def _on_open(self) -> None:
        """Subscribe everything on a new client."""
        self._micro = None
        self._clearance.forget()
        inbox = await self._link.client.subscribe(self._inbox.subject, cb=self._inbox.on_message)
        handle_inline(inbox, self._inbox.take)
        for served in self._served:
            await self._start(served)
        await self._link.barrier()

    def _on_lost(self) -> None:
        self._inbox.fail(
            BusUnavailable(
                "the connection to NATS was lost while waiting; the command may have been carried out"
            )
        )

    async def _on_regained(self) -> None:
        self._clearance.forget()

    def _on_refused(self, verb: str, subject: str) -> None:
        self._clearance.on_refused(verb, subject)
        if verb == "publish":
            self._inbox.fail(publish_refused(subject), subject)
