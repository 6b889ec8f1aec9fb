"""The answer to one completion request: wait for admission, then stream it or send it whole.

An ASGI response. It watches the connection from the start, so that a client who leaves frees its blocks at
once. What goes wrong before the first token is a plain HTTP error, after it an error event. Knows nothing of
the bus.
"""

import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.acceptance import Job
from services.gateway.answer import Answer, Piece
from services.gateway.body import ClientGone
from services.gateway.desk import Desk
from services.gateway.exchange import Exchange, admitted
from services.gateway.record import RequestRecord
from services.gateway.replies import DONE, FinishedChoice, Letterhead, Usage, error_event
from shared.errors import KvasirError

JSON_HEADERS = [(b"content-type", b"application/json")]
EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Delivery(Response):
    """Made by the route once the job is accepted; does everything else when it is called."""

    def __init__(
        self, desk: Desk, job: Job, letterhead: Letterhead, record: RequestRecord, admit_s: float
    ) -> None:
        super().__init__()
        self._desk = desk
        self._job = job
        self._letterhead = letterhead
        self._record = record
        self._admit_s = admit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises KvasirError as long as nothing has been sent."""
        exchange = self._desk.open(self._job, self._record.request_id)
        answers = self._desk.answers(exchange, self._job)
        watcher = asyncio.create_task(_watch(receive, exchange), name="client watcher")
        try:
            await admitted(exchange, self._admit_s)
            if self._job.stream:
                await self._stream(exchange, answers, send)
            else:
                await self._whole(exchange, answers, send)
        except ClientGone:
            self._record.is_gone = True
        finally:
            watcher.cancel()
            self._desk.close(exchange)
            self._desk.note_answered(answers, self._record)

    async def _whole(self, exchange: Exchange, answers: list[Answer], send: Send) -> None:
        texts = [""] * len(answers)
        while True:
            for piece, answer in self._read(exchange, answers):
                texts[answer.index] += piece.text
            if not _pending(answers):
                break
            await exchange.wait()
        choices = [FinishedChoice(a.index, texts[a.index], str(a.finish_reason)) for a in answers]
        body = self._letterhead.whole(choices, self._usage(answers))
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [*JSON_HEADERS, length]})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, exchange: Exchange, answers: list[Answer], send: Send) -> None:
        while not any(answer.stream.tokens for answer in answers):
            await exchange.wait()
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
        try:
            begun: set[int] = set()
            while True:
                if events := self._events(exchange, answers, begun):
                    await send({"type": "http.response.body", "body": events, "more_body": True})
                if not _pending(answers):
                    break
                await exchange.wait()
            usage = self._letterhead.usage_event(self._usage(answers)) if self._job.include_usage else b""
            tail = usage + DONE
        except KvasirError as error:
            self._record.error = error
            tail = error_event(error)
        await send({"type": "http.response.body", "body": tail})

    def _events(self, exchange: Exchange, answers: list[Answer], begun: set[int]) -> bytes:
        events: list[bytes] = []
        for answer in answers:
            if answer.stream.tokens and answer.index not in begun:
                begun.add(answer.index)
                events.append(self._letterhead.role_event(answer.index))
        for piece, answer in self._read(exchange, answers):
            reason = None if piece.finish_reason is None else str(piece.finish_reason)
            events.append(self._letterhead.text_event(answer.index, piece.text, reason))
        return b"".join(events)

    def _read(self, exchange: Exchange, answers: list[Answer]) -> list[tuple[Piece, Answer]]:
        """What has become readable; a choice that a stop string has ended is finished at the desk."""
        pieces: list[tuple[Piece, Answer]] = []
        for answer, sequence in zip(answers, exchange.sequences, strict=True):
            if (piece := answer.read()) is not None:
                pieces.append((piece, answer))
                if piece.finish_reason is not None and answer.is_cut:
                    self._desk.finish(sequence, answer.completion_tokens)
        if pieces:
            self._record.note_first_token()
        return pieces

    def _usage(self, answers: list[Answer]) -> Usage:
        prompt_tokens = sum(len(prompt) for prompt in self._job.prompts)
        firsts = answers[:: self._job.n]
        cached = sum(
            min(answer.stream.cached_tokens, len(prompt))
            for answer, prompt in zip(firsts, self._job.prompts, strict=True)
        )
        return Usage(prompt_tokens, sum(answer.completion_tokens for answer in answers), cached)


def _pending(answers: list[Answer]) -> bool:
    return any(answer.finish_reason is None for answer in answers)


async def _watch(receive: Receive, exchange: Exchange) -> None:
    """Until the client is gone; what it sends before that does not matter any more."""
    while (await receive())["type"] != "http.disconnect":
        pass
    exchange.leave()
