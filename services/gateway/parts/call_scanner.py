"""Incremental parser of a function call as JSON: `{"name": …, "arguments": {…}}`. Pure. Arguments are passed
on as they arrive. Members may have any order; Llama's name is `parameters`."""

import json

from services.gateway.parts.items import AnswerPart, CallArguments, CallBegun

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
        """Whether the call's name has been returned."""
        return self._name is not None

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that the text completes. Do not call after `is_over` or `is_broken`."""
        parts: list[AnswerPart] = []
        begun = 0
        for at, char in enumerate(text):
            if self._read(char, parts):
                continue
            begun = at + 1
            break
        else:
            begun = len(text)
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
            if self._has_streamed:
                if value:
                    parts.append(CallArguments(self.index, value))
            else:
                whole = (_string(value) or "{}") if value.startswith('"') else value
                if self._name is None:
                    self._arguments = whole
                else:
                    parts.append(CallArguments(self.index, whole))

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
