"""Parsers for the formats that models use for reasoning and function calls. Pure. An invalid call is shown as
text. A cut answer shows no partial mark."""

import json

from services.gateway.parts.items import (
    AnswerMarks,
    AnswerPart,
    CallArguments,
    CallBegun,
    Content,
    PartReader,
    Reasoning,
)

_ARGUMENTS = ("arguments", "parameters")
_SPACES = " \t\r\n"


class CallScanner:
    """Parses one object from its `{` on. `rest` is the text after it, once `is_over` or `is_broken`."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.is_over = False
        self.is_broken = False
        """The text is not such an object; no part was returned."""
        self.rest = ""
        self.raw = ""
        self._depth = 0
        self._in_string = self._escapes = False
        self._key: str | None = None
        self._buffer = ""
        self._name: str | None = None
        self._arguments: str | None = None
        """Held until the name is known, or when they are JSON inside a string."""
        self._has_streamed = False

    @property
    def has_begun(self) -> bool:
        return self._name is not None

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that the text completes. Do not call after `is_over` or `is_broken`."""
        parts: list[AnswerPart] = []
        begun = next((at + 1 for at, char in enumerate(text) if not self._read(char, parts)), len(text))
        self.raw += text[:begun]
        self.rest = text[begun:] if self.is_over or self.is_broken else ""
        self._stream(parts)
        if self.is_over and not self.has_begun:
            self.is_broken = True
        return parts

    def _read(self, char: str, parts: list[AnswerPart]) -> bool:
        """Read one character; return False at the end of the object or of a broken one."""
        if self._in_string:
            self._buffer += char
            if self._escapes:
                self._escapes = False
            elif char == "\\":
                self._escapes = True
            elif char == '"':
                self._in_string = False
            return True
        if self._depth == 0:
            if char in _SPACES:
                return True
            self._depth = 1
            self.is_broken = char != "{"
            return not self.is_broken
        if self._depth == 1 and char in ",}":
            self._end_member(parts)
            self.is_over = char == "}"
            return not self.is_over
        if self._depth == 1 and char == ":" and self._key is None:
            self._key, self._buffer = _string(self._buffer), ""
            return True
        self._depth += (char in "{[") - (char in "}]")
        self._in_string = char == '"'
        if self._depth > 1 or char not in _SPACES:
            self._buffer += char
        return True

    def _end_member(self, parts: list[AnswerPart]) -> None:
        value, key = self._buffer.rstrip(_SPACES), self._key
        self._key, self._buffer = None, ""
        if key == "name" and self._name is None and (name := _string(value)):
            self._name = name
            parts.append(CallBegun(self.index, name))
            if self._arguments is not None:
                parts.append(CallArguments(self.index, self._arguments))
                self._arguments = None
        elif key in _ARGUMENTS:
            if value.startswith('"') and not self._has_streamed:
                value = _string(value) or "{}"
            if self._name is None:
                self._arguments = value
            elif value:
                parts.append(CallArguments(self.index, value))

    def _stream(self, parts: list[AnswerPart]) -> None:
        if self._key not in _ARGUMENTS or self._name is None:
            return
        self._has_streamed = self._has_streamed or self._buffer.startswith(("{", "["))
        if self._has_streamed and self._buffer:
            parts.append(CallArguments(self.index, self._buffer))
            self._buffer = ""


def _string(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


THINK, THOUGHT = "<think>", "</think>"
_CALL = '{"name":'


class ThinkingReader:
    """Reasoning up to `</think>`, then `inner`. Without `<think>` at the start of the answer or the end of
    the prompt, `inner` reads everything."""

    def __init__(self, inner: PartReader, *, is_open: bool) -> None:
        """With `is_open`, the prompt ends inside the reasoning."""
        self._inner = inner
        self._marks = AnswerMarks()
        self._state = "thinking" if is_open else "beginning"
        self._seen = ""
        self._space = ""
        """Held space: at the end of the reasoning, or before the answer."""

    def feed(self, text: str) -> list[AnswerPart]:
        if self._state == "beginning":
            self._seen += text
            begun = self._seen.lstrip()
            if THINK.startswith(begun):  # also for no text yet
                return [] if begun != THINK else self._open("")
            text, self._seen = self._seen, ""
            if not begun.startswith(THINK):
                self._state = "answering"
                return self._inner.feed(text)
            return self._open(begun.removeprefix(THINK))
        if self._state == "thinking":
            return self._think(text)
        return self._answer(text)

    def end(self, *, is_cut: bool = False) -> list[AnswerPart]:
        if self._state == "thinking":
            rest = self._marks.take()
            return [] if is_cut else self._reasoning(rest)
        rest, self._seen = self._seen, ""
        if self._state == "beginning" and is_cut:
            rest = ""
        return [*(self._inner.feed(rest) if rest else []), *self._inner.end(is_cut=is_cut)]

    def _open(self, text: str) -> list[AnswerPart]:
        self._state, self._seen = "thinking", ""
        return self._think(text)

    def _think(self, text: str) -> list[AnswerPart]:
        before, mark = self._marks.split(text, (THOUGHT,))
        parts = self._reasoning(before)
        if mark is not None:
            self._state, self._space = "trimming", ""
            parts += self._answer(self._marks.take())
        return parts

    def _reasoning(self, text: str) -> list[AnswerPart]:
        text = self._space + text
        if not self._seen:
            text = text.lstrip("\n")
        self._space = text[len(text.rstrip("\n")) :]
        text = text.rstrip("\n")
        self._seen += text[:1]
        return [Reasoning(text)] if text else []

    def _answer(self, text: str) -> list[AnswerPart]:
        if self._state == "trimming":
            text = text.lstrip("\n")
            if not text:
                return []
            self._state, self._seen = "answering", ""
        return self._inner.feed(text)


class PlainReader:
    """Treats all text as content."""

    def feed(self, text: str) -> list[AnswerPart]:
        return [Content(text)] if text else []

    def end(self, *, is_cut: bool = False) -> list[AnswerPart]:
        return []


class TaggedReader:
    """Calls after a mark: Hermes' and Qwen's `<tool_call>…</tool_call>`, Llama's `<|python_tag|>` or a bare
    object, Mistral's `[TOOL_CALLS]` with a list."""

    def __init__(self, begin: str, ends: tuple[str, ...], *, bare: bool = False) -> None:
        """`begin` opens a call; `ends` are skipped between calls. `bare`: an initial `{` opens one, too."""
        self._begin = begin
        self._skipped = (*ends, "[", "]", ",", ";", " ", "\n", "\r", "\t")
        self._bare = bare
        self._marks = AnswerMarks()
        self._scanner: CallScanner | None = None
        self._opening = ""
        self._calls = 0
        self._is_between = False
        """After a mark or a call, where only another call or a closing mark is expected."""
        self._has_text = False
        self._space = ""

    def feed(self, text: str) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        while text:
            if self._scanner is not None:
                text = self._scan(self._scanner, text, parts)
            elif self._is_between:
                text = self._next(text, parts)
            else:
                text = self._say(text, parts)
        return parts

    def end(self, *, is_cut: bool = False) -> list[AnswerPart]:
        """Return held text; an incomplete call stays as sent."""
        rest = "" if is_cut else self._marks.take()
        scanner, self._scanner = self._scanner, None
        if scanner is not None and not scanner.has_begun:
            if not (is_cut and (self._opening or _begins_call(scanner.raw))):
                rest += self._opening + scanner.raw
        elif self._is_between and self._calls == 0 and not is_cut:
            rest = self._opening + rest
        return self._content(rest)

    def _say(self, text: str, parts: list[AnswerPart]) -> str:
        if self._bare and not self._has_text and text.lstrip().startswith("{"):
            self._scanner, self._opening = CallScanner(self._calls), ""
            return text
        before, mark = self._marks.split(text, (self._begin,))
        if mark is None:
            parts += self._content(before)
            return ""
        if before.strip():
            parts += self._content(before.rstrip())
        self._space = ""
        self._is_between, self._opening = True, mark
        return self._marks.take()

    def _next(self, text: str, parts: list[AnswerPart]) -> str:
        """Read between calls: the next call, skipped marks, or text."""
        rest = self._marks.take() + text
        while rest:
            skipped = next((mark for mark in (*self._skipped, self._begin) if rest.startswith(mark)), None)
            if skipped is None:
                break
            rest = rest[len(skipped) :]
        if rest.startswith("{"):
            self._scanner = CallScanner(self._calls)
            return rest
        if not rest or any(mark.startswith(rest) for mark in (*self._skipped, self._begin)):
            self._marks.hold(rest)
            return ""
        self._is_between = False
        parts += self._content(self._opening + rest if self._calls == 0 else rest)
        return ""

    def _scan(self, scanner: CallScanner, text: str, parts: list[AnswerPart]) -> str:
        parts += scanner.feed(text)
        if scanner.is_broken:
            self._scanner, self._is_between = None, False
            parts += self._content(self._opening + scanner.raw)
            return scanner.rest
        if not scanner.is_over:
            return ""
        self._calls += 1
        self._scanner, self._is_between, self._has_text = None, True, True
        return scanner.rest

    def _content(self, text: str) -> list[AnswerPart]:
        """Return content, holding trailing space: before a call, it is dropped."""
        text = self._space + text
        self._space = text[len(text.rstrip()) :]
        text = text.rstrip()
        self._has_text = self._has_text or bool(text)
        return [Content(text)] if text else []


def _begins_call(text: str) -> bool:
    """Whether a partial bare object looks like a call rather than a JSON answer."""
    return text.lstrip().startswith(_CALL) or _CALL.startswith(text.strip())


class NamedReader:
    """Mistral's newer format: repeated `[TOOL_CALLS]name[ARGS]{…}`."""

    BEGIN, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"

    def __init__(self) -> None:
        self._marks = AnswerMarks()
        self._state = "text"
        self._name = ""
        self._index = -1

    def feed(self, text: str) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        while True:
            wanted = (self.ARGUMENTS,) if self._state == "name" else (self.BEGIN,)
            before, mark = self._marks.split(text, wanted)
            if self._state == "text" and before:
                parts.append(Content(before))
            elif self._state == "name":
                self._name += before
            elif self._state == "arguments" and before:
                parts.append(CallArguments(self._index, before))
            if mark is None:
                return parts
            if mark == self.ARGUMENTS:
                self._index += 1
                parts.append(CallBegun(self._index, self._name.strip()))
                self._state = "arguments"
            else:
                self._state, self._name = "name", ""
            text = ""

    def end(self, *, is_cut: bool = False) -> list[AnswerPart]:
        rest = self._marks.take()
        if is_cut:
            return []
        if self._state == "arguments":
            return [CallArguments(self._index, rest)] if rest else []
        text = f"{self.BEGIN}{self._name}{rest}" if self._state == "name" else rest
        return [Content(text)] if text else []


class HarmonyReader:
    """gpt-oss channels: `analysis` is reasoning, `final` is content, a message to a function is a call."""

    START = "<|start|>"
    _MARKS = ("<|channel|>", "<|message|>", "<|end|>", START, "<|call|>", "<|return|>", "<|constrain|>")

    def __init__(self, begun: str = "") -> None:
        """`begun` is the beginning of the continued message, as the prompt has it."""
        self._marks = AnswerMarks()
        self._header = ""
        self._in_message = False
        self._index = -1
        self._kind = ""
        self.feed(begun)
        self._marks.take()

    def feed(self, text: str) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        while True:
            before, mark = self._marks.split(text, self._MARKS)
            if self._in_message:
                parts += self._piece(before)
            else:
                self._header += before
            if mark is None:
                return parts
            if mark == "<|message|>":
                parts += self._begin()
            elif mark in ("<|end|>", "<|call|>", "<|return|>", self.START):
                self._in_message, self._header = False, ""
            else:
                self._in_message = False
                self._header += " "
            text = ""

    def end(self, *, is_cut: bool = False) -> list[AnswerPart]:
        rest = self._marks.take()
        return self._piece(rest) if self._in_message and not is_cut else []

    def _begin(self) -> list[AnswerPart]:
        words = self._header.split()
        recipient = next((word.removeprefix("to=") for word in words if word.startswith("to=")), "")
        self._in_message, self._header = True, ""
        if recipient.startswith("functions."):
            self._index += 1
            self._kind = "call"
            return [CallBegun(self._index, recipient.removeprefix("functions."))]
        self._kind = "analysis" if "analysis" in words else "final"
        return []

    def _piece(self, text: str) -> list[AnswerPart]:
        if not text:
            return []
        if self._kind == "call":
            return [CallArguments(self._index, text)]
        return [Reasoning(text)] if self._kind == "analysis" else [Content(text)]
