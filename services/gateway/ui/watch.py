"""Pictures of the fleet for the live page, a few times a second while it has viewers. A slow viewer misses
pictures and then gets a complete one (`whole`). History is always kept: one point a second for ten
minutes."""

import asyncio
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import orjson
from msgspec import structs

from services.gateway.core.fleet_picture import batch_rows, debt_rows, totals_of, worker_row
from services.gateway.sessions import Sessions
from shared import subjects
from shared.bus import Bus, fenced
from shared.clock import Clock, unix_s
from shared.errors import KvasirError, Overloaded
from shared.messages.base import Empty, Message
from shared.messages.recordings import Recorded, RecordedEvent, TellRecorded
from shared.messages.reports import ServiceStatus
from shared.messages.sequence import TOKEN_BYTES
from shared.release import VERSION

M = TypeVar("M", bound=Message)
_FIND_S = 5.0
MEMORY = ("resident_mb", "host_free_mb", "host_mb", "device_free_mb", "device_mb")
_DEADLINE_S = 1.0
_AT_ONCE = 16
_MOST_EVENTS = 500
_MOST_HEARD = 16
"""Most instances whose events are read."""


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

    def memory(self, worker: str) -> dict[str, int]:
        """Return the worker's memory of process, host and GPU, in MiB, as far as it is known."""
        told = self.details(worker)
        return {name: told[name] for name in MEMORY if name in told}

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

    async def news(self, kinds: Mapping[str, Sequence[str]]) -> list[tuple[str, RecordedEvent]]:
        """Return events since the last call by instance, in wall-clock order; at first, the latest ones.
        `kinds`: of each service that is asked."""
        asked = [(service, name) for name, service in self._names.items() if service in kinds]
        told = await asyncio.gather(*(self._since(*each, kinds[each[0]]) for each in asked[:_MOST_HEARD]))
        found = [(name, event) for (_, name), events in zip(asked, told, strict=False) for event in events]
        return sorted(found, key=lambda each: each[1].at_s)

    async def _since(self, service: str, name: str, kinds: Sequence[str]) -> list[RecordedEvent]:
        incarnation, seq = self._heard.get(name, (0, None))
        question = TellRecorded(since_seq=seq, kinds=tuple(kinds), is_brief=True, most=_MOST_EVENTS)
        told = await self._recorded(service, name, question)
        if told is None:
            return []
        is_other = incarnation not in (0, told.incarnation)
        self._heard[name] = (told.incarnation, 0 if is_other else told.next_seq)
        return [] if is_other else by_wall_clock(told)

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


PICTURE_S = 0.3
ASK_S = 1.0
SAMPLE_S = 1.0
HISTORY = 600
LATENCY_S = 10.0
LATENCY_HISTORY = 180
GONE_S = 600.0
MOST_GONE = 64
MOST_VIEWERS = 32
QUEUED_PICTURES = 4
SHOWN_REQUESTS = 60
DECISIONS = frozenset({"relief", "move begun", "moved", "worker lost", "preempted"})
HEARD = {"scheduler": (*DECISIONS, "predicted", "left"), "worker": ("step",)}
"""Kinds of events that are read, by service."""
MOST_KEPT = {"events": 200, "steps": 4096, "lengths": 400}
MOST_PREDICTED = 8192


class Viewer:
    """One page's queue. `next` returns the next picture, or None at the end."""

    def __init__(self) -> None:
        self._pictures: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUED_PICTURES)
        self.needs_whole = True

    def offer(self, picture: bytes, *, is_whole: bool = False) -> None:
        """Queue a picture, without waiting. A full queue is cleared until the next whole picture."""
        if self._pictures.full():
            self._drop()
        if is_whole or not self.needs_whole:
            self.needs_whole = False
            self._pictures.put_nowait(picture)

    def end(self) -> None:
        if self._pictures.full():
            self._drop()
        self._pictures.put_nowait(None)

    def _drop(self) -> None:
        while not self._pictures.empty():
            self._pictures.get_nowait()
        self.needs_whole = True

    async def next(self) -> bytes | None:
        return await self._pictures.get()


class Departed:
    """Workers that went or came back in the last ten minutes."""

    def __init__(self) -> None:
        self._present: dict[str, str] = {}
        """Worker to its model."""
        self._rows: dict[str, dict[str, Any]] = {}

    def on_sample(self, present: dict[str, str], now_unix_s: float) -> None:
        for worker, model in self._present.items():
            if worker not in present and len(self._rows) < MOST_GONE:
                row = {"id": worker, "model": model, "gone_unix_s": now_unix_s, "back_unix_s": None}
                self._rows[worker] = row
        for worker in present.keys() & self._rows.keys():
            self._rows[worker]["back_unix_s"] = self._rows[worker]["back_unix_s"] or now_unix_s
        self._present = present

    def rows(self, troubles: Iterable[str], now_unix_s: float) -> list[dict[str, Any]]:
        """Return the workers, each with the stack's troubles that name it."""
        told = {worker: [each for each in troubles if worker in each] for worker in self._rows}
        for worker, row in list(self._rows.items()):
            if now_unix_s - (row["back_unix_s"] or row["gone_unix_s"]) > GONE_S and not told[worker]:
                del self._rows[worker]
        return [{**row, "why": "; ".join(told[worker])} for worker, row in sorted(self._rows.items())]


class Heard:
    """Decisions (`events`), steps and lengths of answers that others recorded. `kept` has the latest,
    `fresh` what no page was told yet."""

    def __init__(self) -> None:
        self.kept = {name: deque[Any](maxlen=most) for name, most in MOST_KEPT.items()}
        self.fresh = {name: deque[Any](maxlen=most) for name, most in MOST_KEPT.items()}
        self._predicted: dict[tuple[str, int], tuple[int, int]] = {}
        """Median and p95 of the first prediction, by request and choice."""

    def take(self, instance: str, event: RecordedEvent) -> None:
        told = event.fields
        if event.kind in DECISIONS:
            shown = {"unix_s": event.at_s, "kind": event.kind, "request": event.request_id, **told}
            self._keep("events", shown)
        elif event.kind == "step":
            row = (instance, event.at_s, told["step_s"], told["prefill_tokens"], told["decodes"])
            self._keep("steps", row)
        elif event.kind == "predicted":
            if len(self._predicted) >= MOST_PREDICTED:
                del self._predicted[next(iter(self._predicted))]
            predicted = (told["p50_tokens"], told["p95_tokens"])
            self._predicted.setdefault((event.request_id, told["choice"]), predicted)
        elif told["became"] == "ended":  # not of one that goes on elsewhere
            found = self._predicted.pop((event.request_id, told["choice"]), None)
            if found is not None:
                self._keep("lengths", (*found, told["generated_tokens"]))

    def _keep(self, name: str, row: object) -> None:
        self.kept[name].append(row)
        self.fresh[name].append(row)

    def told(self) -> dict[str, list[Any]]:
        """Return what is fresh, once."""
        fresh = {name: list(rows) for name, rows in self.fresh.items()}
        for rows in self.fresh.values():
            rows.clear()
        return fresh


class Watch:
    """The viewers of one gateway, and the history. `dashboards`: address that the page links to."""

    def __init__(
        self, sessions: Sessions, colleagues: Colleagues, now_s: Clock, dashboards: str = ""
    ) -> None:
        self._dashboards = dashboards
        self._sessions = sessions
        self._colleagues = colleagues
        self._now_s = now_s
        self._began_s = now_s()
        self._viewers: set[Viewer] = set()
        self._arrived = asyncio.Event()
        self._is_closed = False
        self._history: deque[dict[str, float]] = deque(maxlen=HISTORY)
        self._latencies: deque[dict[str, Any]] = deque(maxlen=LATENCY_HISTORY)
        self._departed = Departed()
        self._heard = Heard()
        self._sampled: tuple[float, ...] | None = None

    def join(self) -> Viewer:
        """Add a viewer. Raises Overloaded at the limit."""
        if len(self._viewers) >= MOST_VIEWERS:
            raise Overloaded(f"{MOST_VIEWERS} pages look already: close one", retry_after_s=10.0)
        viewer = Viewer()
        self._viewers.add(viewer)
        self._arrived.set()
        if self._is_closed:
            viewer.end()
        return viewer

    def leave(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)

    def close(self) -> None:
        self._is_closed = True
        for viewer in self._viewers:
            viewer.end()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._sample())
            tasks.create_task(self._ask())
            tasks.create_task(self._show())

    async def _sample(self) -> None:
        while True:
            with fenced("history of the live page"):
                self._history.append(self._point())
                self._look()
            await asyncio.sleep(SAMPLE_S)

    def _look(self) -> None:
        """Note who is there, and every ten seconds how long requests took."""
        now = unix_s()
        self._departed.on_sample(
            {report.worker_id: report.model for report in self._sessions.workers.reports()}, now
        )
        if not self._latencies or now - self._latencies[-1]["unix_s"] >= LATENCY_S:
            self._latencies.append({"unix_s": round(now, 2), "models": self._recent()})

    def _recent(self) -> list[dict[str, Any]]:
        return self._sessions.counters.recent.picture(self._now_s())

    async def _ask(self) -> None:
        while True:
            await self._somebody()
            with fenced("questions of the live page"):
                await self._colleagues.ask()
                for instance, event in await self._colleagues.news(HEARD):
                    self._heard.take(instance, event)
            await asyncio.sleep(ASK_S)

    async def _show(self) -> None:
        while True:
            await self._somebody()
            with fenced("the live page"):
                self._show_now()
            await asyncio.sleep(PICTURE_S)

    async def _somebody(self) -> None:
        while not self._viewers:
            self._arrived.clear()
            await self._arrived.wait()

    def _show_now(self) -> None:
        fresh, picture = self._heard.told(), self.picture()
        part = whole = b""
        for viewer in list(self._viewers):
            if viewer.needs_whole:
                kept = {name: list(rows) for name, rows in self._heard.kept.items()}
                past = {"history": list(self._history), "latencies": list(self._latencies)}
                whole = whole or _event("whole", {**picture, **kept, **past})
                viewer.offer(whole, is_whole=True)
            else:
                point = self._history[-1] if self._history else None
                latency = self._latencies[-1] if self._latencies else None
                part = part or _event("part", {**picture, **fresh, "point": point, "latency": latency})
                viewer.offer(part)

    def picture(self) -> dict[str, Any]:
        """Return the current picture without history and events."""
        sessions, now_s = self._sessions, self._now_s()
        reports = sessions.workers.reports()
        rows = [worker_row(each, sessions.workers.unheard_s(each.worker_id, now_s)) for each in reports]
        for row in rows:
            row["memory"] = self._colleagues.memory(row["id"])
        scheduler = sessions.scheduler
        troubles = sessions.stack.troubles(now_s) or ()
        return {
            "unix_s": unix_s(),
            "totals": totals_of(rows),
            "workers": rows,
            "debts": debt_rows(reports),
            "fleet": {
                "queued": scheduler.said("queued"),
                "running": scheduler.said("running"),
                "preemptions": scheduler.said("preemptions"),
                "hit_tokens": scheduler.hit_tokens,
                "policy": scheduler.policy,
                "scheduler": scheduler.scheduler_ids if scheduler.is_present(now_s) else None,
                "shards": scheduler.rows(now_s),
                "unready": sessions.unready_reasons(),
                "troubles": troubles,
                "short_of": sessions.stack.shortages(now_s),
                "uncached": [each.worker_id for each in reports if not each.caches_prefixes],
            },
            "departed": self._departed.rows(troubles, unix_s()),
            "recent": self._recent(),
            "release": VERSION,
            "dashboards": self._dashboards,
            "up_s": round(now_s - self._began_s),
            "requests": self._requests(now_s),
            "open_requests": sessions.active,
            **self._colleagues.picture(),
        }

    def worker(self, worker_id: str) -> dict[str, Any] | None:
        """Return one worker with its batch and details; None if unknown."""
        for report in self._sessions.workers.reports():
            if report.worker_id == worker_id:
                row = worker_row(report, self._sessions.workers.unheard_s(worker_id, self._now_s()))
                told = self._colleagues.details(worker_id)
                return {**row, "batch": batch_rows(report.sequences), "details": told}
        return None

    def _requests(self, now_s: float) -> list[dict[str, Any]]:
        return [
            {
                "id": sequence.stream.key[0],
                "choice": sequence.stream.key[1],
                "worker": sequence.stream.server[0] if sequence.stream.server else None,
                "tokens": len(sequence.stream.tokens),
                "prompt_tokens": len(sequence.prompt) // TOKEN_BYTES,
                "max_tokens": sequence.sampling.max_tokens,
                "age_s": round(now_s - sequence.exchange.accepted_s, 2),
                "attempt": sequence.stream.attempt,
            }
            for sequence in self._sessions.latest(SHOWN_REQUESTS)
        ]

    def _point(self) -> dict[str, float]:
        sessions = self._sessions
        totals = totals_of([worker_row(each, 0.0) for each in sessions.workers.reports()])
        tokens, hits = totals["tokens"], totals["hits"]
        found = float(hits["device"] + hits["host"] + hits["disk"] + hits["peer"])
        now = (unix_s(), sessions.output_tokens, found, found + hits["misses"], sessions.prompt_tokens)
        before, self._sampled = self._sampled or now, now
        elapsed_s = max(now[0] - before[0], 1e-3)
        asked = now[3] - before[3]
        return {
            "unix_s": round(now[0], 2),
            "kv": round(tokens["used"] / tokens["total"], 4) if tokens["total"] else 0.0,
            "cached": round(tokens["evictable"] / tokens["total"], 4) if tokens["total"] else 0.0,
            "running": sessions.scheduler.said("running"),
            "queued": sessions.scheduler.said("queued"),
            "tokens_per_s": round(max(0.0, now[1] - before[1]) / elapsed_s, 1),
            "prompt_tokens_per_s": round((now[4] - before[4]) / elapsed_s, 1),
            "hit_share": round((now[2] - before[2]) / asked, 4) if asked > 0 else 0.0,
        }


def _event(kind: str, content: object) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(content) + b"\n\n"
