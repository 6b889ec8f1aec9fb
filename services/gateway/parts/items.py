"""What an answer is made of: text, reasoning, calls of functions. Pure.

Every format of a model's answers is read into these, and every API writes them out.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of what is said to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The answer calls a function; its arguments follow. Calls are counted from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments, a JSON text."""

    index: int
    text: str


AnswerPart = Content | Reasoning | CallBegun | CallArguments


class PartReader(Protocol):
    """Reads one answer, piece by piece; what may be the beginning of a mark waits."""

    def feed(self, text: str) -> list[AnswerPart]: ...

    def end(self, *, is_cut: bool = False) -> list[AnswerPart]:
        """Return what waited: as the text it looks like, unless the answer `is_cut` by its limit or a stop
        string. Then the beginning of a mark, or of a call without a name, is dropped."""
        ...


@dataclass(slots=True)
class ToolCallItem:
    name: str
    arguments: str = ""


@dataclass(slots=True)
class AnswerMessage:
    """The parts of one answer put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCallItem] = field(default_factory=list)

    def add(self, parts: Iterable[AnswerPart]) -> None:
        for part in parts:
            if isinstance(part, Content):
                self.content += part.text
            elif isinstance(part, Reasoning):
                self.reasoning += part.text
            elif isinstance(part, CallBegun):
                self.calls.append(ToolCallItem(part.name))
            else:
                self.calls[part.index].arguments += part.text


class AnswerMarks:
    """Finds marks in a growing text and holds back what may become one."""

    def __init__(self) -> None:
        self._held = ""

    def split(self, text: str, marks: tuple[str, ...]) -> tuple[str, str | None]:
        """What comes before the first of `marks`, and which one that is; the text after it stays here.

        None: no mark so far; the end of the text that may be the beginning of one stays here.
        """
        window, self._held = self._held + text, ""
        found = [(at, mark) for mark in marks if (at := window.find(mark)) >= 0]
        if found:
            at, mark = min(found, key=lambda each: (each[0], -len(each[1])))
            self._held = window[at + len(mark) :]
            return window[:at], mark
        keep = next((n for n in range(_longest(window, marks), 0, -1) if _begins(window[-n:], marks)), 0)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep], None

    def hold(self, text: str) -> None:
        """Hold it back until `take`, or until more makes a mark of it."""
        self._held += text

    def take(self) -> str:
        """What is held back; nothing from then on."""
        held, self._held = self._held, ""
        return held


def _longest(window: str, marks: tuple[str, ...]) -> int:
    return min(len(window), max(map(len, marks)) - 1)


def _begins(tail: str, marks: tuple[str, ...]) -> bool:
    return any(mark.startswith(tail) for mark in marks)
