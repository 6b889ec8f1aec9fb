"""Query the status of all instances over the bus. A scatter-gather per service finds its instances. Each is
then asked on its own subject, where no other instance can reply. The supervisor uses it as a probe, and
`status` prints it. The bus is imported on first use, after the children have been started."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shared import subjects
from shared.config import BusConfig
from shared.errors import BusUnavailable, DeadlineExceeded, InvalidMessage, KvasirError, NoResponder
from shared.messages.base import Empty, Message
from shared.messages.recordings import Recorded, TellRecorded
from shared.messages.reports import ServiceStatus

if TYPE_CHECKING:
    from shared.bus import Bus, Handler

_PROBE_S = 0.3


class RollCall:
    """Queries services over its own connection, opened on first use."""

    def __init__(self, config: BusConfig) -> None:
        self._config = config
        self._bus: Bus | None = None
        self._connecting = asyncio.Lock()
        self._closed = False

    async def ask(
        self, service: str, *, deadline_s: float, expected: int | None = None
    ) -> list[ServiceStatus]:
        """Return each instance's own status, within twice the deadline. Raise KvasirError if the bus cannot
        be reached."""
        bus = await self._connected()
        subject = subjects.status(service)
        found = await bus.gather(subject, Empty(), ServiceStatus, deadline_s=deadline_s, expected=expected)
        names = sorted({status.instance for status in found})
        answers = await asyncio.gather(*(self._own(service, name, deadline_s) for name in names))
        return [status for status in answers if status is not None]

    async def ask_one(self, service: str, instance: str, *, deadline_s: float) -> ServiceStatus:
        """Return the instance's own status. Raise KvasirError if it does not reply in time."""
        bus = await self._connected()
        subject = subjects.instance_status(service, instance)
        status = await bus.request(subject, Empty(), ServiceStatus, deadline_s=deadline_s)
        if (status.service, status.instance) != (service, instance):
            raise InvalidMessage(f"{instance} calls itself {status.service} {status.instance}")
        return status

    async def recorded(self, service: str, instance: str, since_seq: int, *, deadline_s: float) -> Recorded:
        """Return its events after `since_seq`, as many as fit one message. Raise KvasirError."""
        bus = await self._connected()
        subject, question = subjects.recorded(service, instance), TellRecorded(since_seq=since_seq)
        return await bus.request(subject, question, Recorded, deadline_s=deadline_s)

    async def ask_all(self, expected: Mapping[str, int], *, deadline_s: float) -> list[ServiceStatus]:
        """Return the status of all instances, in the order of `subjects.SERVICES`, then by instance. Stop
        waiting for a service after `expected` replies from it."""
        answers = await asyncio.gather(
            *(self.ask(s, deadline_s=deadline_s, expected=expected.get(s)) for s in subjects.SERVICES)
        )
        return [status for group in answers for status in sorted(group, key=lambda status: status.instance)]

    async def _own(self, service: str, instance: str, deadline_s: float) -> ServiceStatus | None:
        try:
            return await self.ask_one(service, instance, deadline_s=deadline_s)
        except KvasirError:
            return None

    async def listen(self, handlers: "Sequence[Handler]", target: object) -> None:
        """Attach handlers on the same connection. Raise KvasirError if the bus cannot be reached."""
        await (await self._connected()).attach(handlers, target)

    async def announce(self, subject: str, message: Message) -> None:
        """Publish on the same connection. Raise KvasirError if the bus cannot be reached."""
        await (await self._connected()).publish(subject, message)

    async def close(self) -> None:
        """Close the connection. Idempotent; later queries raise BusUnavailable."""
        self._closed = True
        if self._bus is not None:
            await self._bus.close()
            self._bus = None

    async def _connected(self) -> "Bus":
        async with self._connecting:
            if self._closed:
                raise BusUnavailable("the roll call is closed")
            if self._bus is None:
                from shared.bus import Bus

                self._bus = await Bus.connect(self._config, service=subjects.OPERATOR, instance="operator-0")
            return self._bus


async def replies(roll: RollCall, service: str, instances: Sequence[str], age_s: float) -> str | None:
    """Probe whether all instances of the process reply, with an uptime no longer than its age."""

    async def obstacle(instance: str) -> str | None:
        try:
            answer = await roll.ask_one(service, instance, deadline_s=_PROBE_S)
        except (NoResponder, DeadlineExceeded):
            return "does not answer on the bus yet"
        except KvasirError as error:
            return error.message
        if answer.uptime_s > age_s:
            return "does not answer on the bus yet"
        return answer.details.get("loading") or None

    return next(filter(None, await asyncio.gather(*map(obstacle, instances))), None)
