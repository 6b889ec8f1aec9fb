"""Queries to the other services for people: their `status` and flight recorders. A scatter finds the
instances every few seconds. Each is then queried on its own subject, where no other instance can reply.
Queries run only on demand."""

import asyncio
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar

from msgspec import structs

from shared import subjects
from shared.bus import Bus
from shared.clock import Clock
from shared.errors import KvasirError
from shared.messages.base import Empty, Message
from shared.messages.recordings import Recorded, RecordedEvent, TellRecorded
from shared.messages.reports import ServiceStatus

M = TypeVar("M", bound=Message)
_FIND_S = 5.0
_DEADLINE_S = 1.0
_AT_ONCE = 16
_MOST_EVENTS = 500


class Colleagues:
    """All instances on the bus, including this one."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._found_s = self._workers_s = float("-inf")
        self._names: dict[str, str] = {}
        """Instance to service."""
        self._told: dict[str, ServiceStatus] = {}
        self._heard: dict[str, tuple[int, int | None]] = {}
        """Incarnation and last event received, by recorder."""
        self._at_once = asyncio.Semaphore(_AT_ONCE)

    async def ask(self) -> None:
        """Query every instance; workers only every few seconds, since heartbeats carry most of their state.
        An instance that does not reply keeps its last status until it is no longer found."""
        await self.find()
        with_workers = self._clock() - self._workers_s >= _FIND_S
        if with_workers:
            self._workers_s = self._clock()
        asked = [
            (service, name) for name, service in self._names.items() if with_workers or service != "worker"
        ]
        asked.sort(key=lambda each: each[0] == "worker")
        answers = await asyncio.gather(*(self._status(service, name) for service, name in asked))
        for answer in answers:
            if answer is not None:
                self._told[answer.instance] = answer

    async def find(self) -> None:
        """Find the instances, every few seconds."""
        if self._clock() - self._found_s < _FIND_S:
            return
        self._found_s = self._clock()
        groups = await asyncio.gather(*(self._scatter(service) for service in subjects.SERVICES))
        self._names = {name: service for group in groups for name, service in group}
        self._told = {name: told for name, told in self._told.items() if name in self._names}
        self._heard = {name: heard for name, heard in self._heard.items() if name in self._names}

    def details(self, instance: str) -> dict[str, Any]:
        """Return the instance's last details; empty if unknown."""
        return self._told[instance].details if instance in self._told else {}

    def picture(self) -> dict[str, Any]:
        """Return the live page's part about instances without heartbeats here."""
        shown: dict[str, Any] = {"services": []}
        for name, told in sorted(self._told.items()):
            if told.service != "worker":
                row = {"instance": name, "service": told.service, "uptime_s": round(told.uptime_s)}
                shown["services"].append({**row, "details": _scalars(told.details)})
            if told.service == "scheduler" and told.details.get("role") == "leader":
                shown["queue"] = told.details.get("queue", [])
                shown["tenants"] = told.details.get("tenants", [])
        return shown

    async def news(self, kinds: Sequence[str]) -> list[RecordedEvent]:
        """Return schedulers' events since the last call, in wall-clock order; at first, the latest ones."""
        found: list[RecordedEvent] = []
        for name, service in self._names.items():
            if service != "scheduler":
                continue
            incarnation, seq = self._heard.get(name, (0, None))
            question = TellRecorded(since_seq=seq, kinds=tuple(kinds), most=_MOST_EVENTS)
            told = await self._recorded(service, name, question)
            if told is None:
                continue
            is_other = incarnation not in (0, told.incarnation)
            self._heard[name] = (told.incarnation, 0 if is_other else told.next_seq)
            found += [] if is_other else by_wall_clock(told)
        return sorted(found, key=lambda event: event.at_s)

    async def remembered(self, request_id: str) -> list[Recorded]:
        """Return all records of a request; instances that do not reply are left out."""
        return await self._records(TellRecorded(request_id=request_id), subjects.SERVICES)

    async def everybodys(self, kinds: Sequence[str]) -> list[Recorded]:
        """Return the latest events of these kinds, of all requests, from schedulers and gateways."""
        return await self._records(TellRecorded(kinds=tuple(kinds)), ("scheduler", "gateway"))

    async def _records(self, question: TellRecorded, services: Collection[str]) -> list[Recorded]:
        await self.find()
        asked = [(service, name) for name, service in self._names.items() if service in services]
        told = await asyncio.gather(*(self._recorded(*each, question) for each in asked))
        return [each for each in told if each is not None]

    async def _scatter(self, service: str) -> Iterable[tuple[str, str]]:
        answers = await self._bus.gather(
            subjects.status(service), Empty(), ServiceStatus, deadline_s=_DEADLINE_S / 2
        )
        return sorted({(answer.instance, service) for answer in answers})

    async def _status(self, service: str, name: str) -> ServiceStatus | None:
        subject = subjects.instance_status(service, name)
        return await self._answer(subject, Empty(), ServiceStatus, _DEADLINE_S)

    async def _recorded(self, service: str, name: str, question: TellRecorded) -> Recorded | None:
        return await self._answer(subjects.recorded(service, name), question, Recorded, 2 * _DEADLINE_S)

    async def _answer(self, subject: str, question: Message, kind: type[M], deadline_s: float) -> M | None:
        async with self._at_once:
            try:
                return await self._bus.request(subject, question, kind, deadline_s=deadline_s)
            except KvasirError:
                return None


def by_wall_clock(told: Recorded) -> list[RecordedEvent]:
    """Return the events with `at_s` in Unix seconds."""
    ahead_s = told.unix_s - told.now_s
    return [structs.replace(event, at_s=event.at_s + ahead_s) for event in told.events]


def _scalars(details: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in details.items() if not isinstance(value, list | dict)}
