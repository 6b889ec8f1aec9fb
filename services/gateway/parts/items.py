"""Parts of an answer: text, reasoning and function calls. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """Start of a function call; its arguments follow. Calls are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments, a JSON text."""

    index: int
    text: str


AnswerPart = Content | Reasoning | CallBegun | CallArguments


class PartReader(Protocol):
    """Parses one answer incrementally; text that may begin a mark is held."""

    def feed(self, text: str) -> list[AnswerPart]: ...

    def end(self, *, is_cut: bool = False) -> list[AnswerPart]:
        """Return the held text. If the answer `is_cut`, drop an incomplete mark or a call without a name."""
        ...


@dataclass(slots=True)
class ToolCallItem:
    name: str
    arguments: str = ""


@dataclass(slots=True)
class AnswerMessage:
    """One answer, assembled from its parts."""

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


def undecided(window: str, marks: Sequence[str]) -> int:
    """Return the length of the longest suffix of `window` that begins one of `marks`."""
    for length in range(min(len(window), max(map(len, marks)) - 1), 0, -1):
        if any(mark.startswith(window[-length:]) for mark in marks):
            return length
    return 0


class AnswerMarks:
    """Finds marks in a growing text; holds text that may become one."""

    def __init__(self) -> None:
        self._held = ""

    def split(self, text: str, marks: tuple[str, ...]) -> tuple[str, str | None]:
        """Return the text before the first of `marks`, and that mark; hold the text after it. The mark is
        None if there is none yet; text that may begin one is held."""
        window, self._held = self._held + text, ""
        found = [(at, mark) for mark in marks if (at := window.find(mark)) >= 0]
        if found:
            at, mark = min(found, key=lambda each: (each[0], -len(each[1])))
            self._held = window[at + len(mark) :]
            return window[:at], mark
        keep = undecided(window, marks)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep], None

    def hold(self, text: str) -> None:
        self._held += text

    def take(self) -> str:
        held, self._held = self._held, ""
        return held
