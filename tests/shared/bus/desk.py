"""A service for the tests: a few messages, a handler table and the object behind it, which does what it is
told to.
"""

import asyncio
from typing import Any

from prometheus_client import CollectorRegistry

from shared import errors
from shared.bus import Endpoint, Listener
from shared.messages.base import Message
from shared.spans import trace_id

ASK = "kvasir.v1.cmd.desk.ask"
CENSUS = "kvasir.v1.cmd.desk.census"
NOTED = "kvasir.v1.evt.desk.noted"
FILED = "kvasir.v1.evt.desk.filed"


class Question(Message, frozen=True, kw_only=True):
    text: str = "answer"
    number: int = 0
    reply_bytes: int = 0


class Answer(Message, frozen=True, kw_only=True):
    text: str
    number: int = 0
    trace_id: str | None = None


class Note(Message, frozen=True, kw_only=True):
    text: str = ""
    number: int = 0


class Desk:
    """Answers questions, keeps notes. `gate` holds back asynchronous handlers while it is clear."""

    def __init__(self, name: str = "desk-0") -> None:
        self.name = name
        self.gate = asyncio.Event()
        self.gate.set()
        self.running, self.most_running = 0, 0
        self.noted: list[int] = []
        self.filed: list[int] = []

    async def ask(self, question: Question) -> Answer:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.gate.wait()
            return self._answer(question)
        finally:
            self.running -= 1

    def _answer(self, question: Question) -> Answer:
        match question.text:
            case "cancelled":
                raise asyncio.CancelledError
            case "foreign":
                raise ValueError("the safe's combination is 1234")
            case "typed":
                raise errors.ContextOverflow("too long", param="prompt", retry_after_s=2.5)
        return Answer(
            text=question.text + "x" * question.reply_bytes, number=question.number, trace_id=trace_id()
        )

    async def census(self, _question: Question) -> Answer:
        if self.name == "broken":
            raise RuntimeError("no answer from this one")
        return Answer(text=self.name)

    def note(self, note: Note) -> None:
        """Inline."""
        if note.text == "cancelled":
            raise asyncio.CancelledError
        if note.text == "foreign":
            raise ValueError("a bug")
        self.noted.append(note.number)

    async def file(self, note: Note) -> None:
        """In a lane."""
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await self.gate.wait()
        self.running -= 1
        if note.text == "cancelled":
            raise asyncio.CancelledError
        self.filed.append(note.number)


ASK_ENDPOINT = Endpoint(ASK, Question, "ask", concurrency=4, pending_limit=3)
CENSUS_GATHERABLE = Endpoint(CENSUS, Question, "census")
NOTE_LISTENER = Listener(NOTED, Note, "note")
FILE_LISTENER = Listener(FILED, Note, "file", pending_limit=50)
HANDLERS = (ASK_ENDPOINT, CENSUS_GATHERABLE, NOTE_LISTENER, FILE_LISTENER)


def metric(registry: CollectorRegistry, name: str, **labels: Any) -> float:
    """A sample's value, 0 when there is none yet."""
    return registry.get_sample_value(name, labels) or 0.0
