"""Names of what a request asks for and does not get.

Vendors add fields every month, and their own clients send them. A field that this server does not know has no
effect, on every API alike; the answer's `x-kvasir-ignored` header and a metric name it. With
`gateway.unknown_fields: refuse` the request is refused instead.
"""

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from services.gateway.errors import UnsupportedFeature, shown
from shared.errors import InvalidRequest

MOST_IGNORED = 32
"""Names kept for one request."""


class Ignored:
    """Names of what one request asks for and does not get."""

    def __init__(self, *, is_strict: bool = False) -> None:
        """`is_strict`: what this server does not know is refused instead."""
        self._is_strict = is_strict
        self._names: dict[str, None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Each once, in the order of the request."""
        return tuple(self._names)

    def note(self, name: str) -> None:
        """Add what has no effect, which is never refused."""
        if len(self._names) < MOST_IGNORED:
            self._names[name[:64]] = None

    def others(
        self,
        fields: Mapping[str, Any] | None,
        known: Collection[str],
        path: str = "",
        without_effect: Collection[str] = (),
    ) -> None:
        """Note those of the object at `path` that are not `known`, unless their values ask for nothing.

        Raises InvalidRequest naming the field, and the one that may be meant, where this is strict and the
        field is not one `without_effect` either.
        """
        for name, value in (fields or {}).items():
            if name in known or _asks_for_nothing(value) or (value is False and name in without_effect):
                continue
            where = f"{path}.{name}" if path else name
            if self._is_strict and name not in without_effect:
                close = difflib.get_close_matches(name[:64], [*known, *without_effect], n=1)
                meant = f": is {close[0]} meant?" if close else "; leave it out"
                raise InvalidRequest(f"there is no field {shown(where, 64)!r}{meant}", param=shown(where, 64))
            self.note(where)

    def tool(self, kind: Any, path: str) -> None:
        """Note a tool that is no function. Raises UnsupportedFeature where this is strict."""
        if self._is_strict:
            text = f"tools of type {shown(repr(kind), 100)} are not supported: only functions are"
            raise UnsupportedFeature(text, param=f"{path}.type")
        self.note(f"tools.{kind}")


def _asks_for_nothing(value: Any) -> bool:
    return value is None or value in ("", [], {})
