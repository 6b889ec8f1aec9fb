"""A call of a function as a JSON object whose text is still coming: `{"name": …, "arguments": {…}}`. Pure.

The arguments go on as they come, as text. Whatever order the members have; Llama calls them `parameters`.
"""

import json

from services.gateway.parts.items import AnswerPart, CallArguments, CallBegun

_ARGUMENTS = ("arguments", "parameters")
_SPACES = " \t\r\n"


class CallScanner:
    """One object, from its `{` on. `rest` is what follows it, once it `is_over` or `is_broken`."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.is_over = False
        self.is_broken = False
        """It is no such object; nothing of it has been handed out."""
        self.rest = ""
        self.raw = ""
        """All that it has read."""
        self._depth = 0
        self._in_string = self._escapes = False
        self._key: str | None = None
        self._buffer = ""
        """Of the key or value that is being read."""
        self._name: str | None = None
        self._arguments: str | None = None
        """Held until the name is known, or because they are a JSON text inside a string."""
        self._has_streamed = False

    @property
    def has_begun(self) -> bool:
        """The call was handed out."""
        return self._name is not None

    def feed(self, text: str) -> list[AnswerPart]:
        """What the text makes known. After `is_over` or `is_broken` it must not be called again."""
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
        """False once the object is over, or is none."""
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
        """What there is of the arguments."""
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
