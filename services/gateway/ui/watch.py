"""Pictures of the fleet for the live page, a few times a second while it has viewers. A slow viewer misses
pictures and then gets a complete one (`whole`). History is always kept: one point a second for ten
minutes."""

import asyncio
from collections import deque
from typing import Any

import orjson

from services.gateway.core.fleet_picture import batch_rows, debt_rows, totals_of, worker_row
from services.gateway.sessions import Sessions
from services.gateway.ui.colleagues import Colleagues
from shared.bus import fenced
from shared.clock import Clock, unix_s
from shared.errors import Overloaded
from shared.messages.recordings import RecordedEvent
from shared.messages.sequence import TOKEN_BYTES

PICTURE_S = 0.3
ASK_S = 1.0
SAMPLE_S = 1.0
HISTORY = 600
MOST_VIEWERS = 32
QUEUED_PICTURES = 4
RECENT = 200
SHOWN_REQUESTS = 60
EVENT_KINDS = ("relief", "move begun", "moved", "worker lost", "preempted")


class Viewer:
    """One page's queue. `next` returns the next picture, or None at the end."""

    def __init__(self) -> None:
        self._pictures: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUED_PICTURES)
        self.needs_whole = True
        self.missed = 0

    def offer(self, picture: bytes, *, is_whole: bool = False) -> None:
        """Queue a picture, without waiting. A full queue is cleared until the next whole picture."""
        if self._pictures.full():
            self._drop()
        if is_whole or not self.needs_whole:
            self.needs_whole = False
            self._pictures.put_nowait(picture)

    def end(self) -> None:
        """End the stream."""
        if self._pictures.full():
            self._drop()
        self._pictures.put_nowait(None)

    def _drop(self) -> None:
        while not self._pictures.empty():
            self._pictures.get_nowait()
            self.missed += 1
        self.needs_whole = True

    async def next(self) -> bytes | None:
        return await self._pictures.get()


class Watch:
    """The viewers of one gateway, and the history."""

    def __init__(self, sessions: Sessions, colleagues: Colleagues, now_s: Clock) -> None:
        self._sessions = sessions
        self._colleagues = colleagues
        self._now_s = now_s
        self._viewers: set[Viewer] = set()
        self._arrived = asyncio.Event()
        self._is_closed = False
        self._history: deque[dict[str, float]] = deque(maxlen=HISTORY)
        self._events: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._fresh: list[dict[str, Any]] = []
        self._sampled: tuple[float, float, float, float] | None = None

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
        """End all streams before shutdown."""
        self._is_closed = True
        for viewer in self._viewers:
            viewer.end()

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._sample())
            tasks.create_task(self._ask())
            tasks.create_task(self._show())

    async def _sample(self) -> None:
        while True:
            with fenced("history of the live page"):
                self._history.append(self._point())
            await asyncio.sleep(SAMPLE_S)

    async def _ask(self) -> None:
        while True:
            await self._somebody()
            with fenced("questions of the live page"):
                await self._colleagues.ask()
                shown = [_shown(event) for event in await self._colleagues.news(EVENT_KINDS)]
                self._events.extend(shown)
                self._fresh.extend(shown)
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
        fresh, self._fresh = self._fresh, []
        picture = self.picture()
        part = whole = b""
        for viewer in list(self._viewers):
            if viewer.needs_whole:
                whole = whole or _event(
                    "whole", {**picture, "history": list(self._history), "events": list(self._events)}
                )
                viewer.offer(whole, is_whole=True)
            else:
                part = part or _event(
                    "part",
                    {**picture, "events": fresh, "point": self._history[-1] if self._history else None},
                )
                viewer.offer(part)

    def picture(self) -> dict[str, Any]:
        """Return the current picture without history and events."""
        sessions, now_s = self._sessions, self._now_s()
        reports = sessions.workers.reports()
        rows = [worker_row(each, sessions.workers.unheard_s(each.worker_id, now_s)) for each in reports]
        scheduler = sessions.scheduler
        return {
            "unix_s": unix_s(),
            "totals": totals_of(rows),
            "workers": rows,
            "debts": debt_rows(reports),
            "fleet": {
                "queued": scheduler.said.queued,
                "running": scheduler.said.running,
                "preemptions": scheduler.said.preemptions,
                "hit_tokens": scheduler.hit_tokens,
                "policy": scheduler.said.policy,
                "scheduler": scheduler.scheduler_id if scheduler.is_present(now_s) else None,
                "unready": sessions.unready_reasons(),
                "troubles": sessions.stack.troubles(now_s) or (),
            },
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
        reports = sessions.workers.reports()
        totals = totals_of([worker_row(each, 0.0) for each in reports])
        tokens, hits = totals["tokens"], totals["hits"]
        found = float(hits["device"] + hits["host"] + hits["disk"] + hits["peer"])
        now = (unix_s(), float(sessions.output_tokens), found, found + hits["misses"])
        before, self._sampled = self._sampled or now, now
        elapsed_s = max(now[0] - before[0], 1e-3)
        asked = now[3] - before[3]
        return {
            "unix_s": round(now[0], 2),
            "kv": round(tokens["used"] / tokens["total"], 4) if tokens["total"] else 0.0,
            "cached": round(tokens["evictable"] / tokens["total"], 4) if tokens["total"] else 0.0,
            "running": sessions.scheduler.said.running,
            "queued": sessions.scheduler.said.queued,
            "tokens_per_s": round(max(0.0, now[1] - before[1]) / elapsed_s, 1),
            "hit_share": round((now[2] - before[2]) / asked, 4) if asked > 0 else 0.0,
        }


def _shown(event: RecordedEvent) -> dict[str, Any]:
    return {"unix_s": event.at_s, "kind": event.kind, "request": event.request_id, **event.fields}


def _event(kind: str, content: object) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(content) + b"\n\n"
