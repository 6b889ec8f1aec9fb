"""Request fields that have no effect.

Vendors and their clients add fields every month. An unknown field has no effect; the `x-kvasir-ignored`
header and a metric name it. With `gateway.unknown_fields: refuse` the request is refused.
"""

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from services.gateway.errors import UnsupportedFeature, shown
from shared.errors import InvalidRequest

MOST_IGNORED = 32
"""Limit of names per request."""


class Ignored:
    """Names of one request's fields and tools that have no effect."""

    def __init__(self, *, is_strict: bool = False) -> None:
        """With `is_strict`, unknown fields are refused."""
        self._is_strict = is_strict
        self._names: dict[str, None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Unique names in the request's order."""
        return tuple(self._names)

    def note(self, name: str) -> None:
        """Add a name; never refuses."""
        if len(self._names) < MOST_IGNORED:
            self._names[name[:64]] = None

    def others(
        self,
        fields: Mapping[str, Any] | None,
        known: Collection[str],
        path: str = "",
        without_effect: Collection[str] = (),
    ) -> None:
        """Note fields of the object at `path` that are not `known`, unless their value is empty.

        If strict, raises InvalidRequest for fields that are not in `without_effect` either; it suggests a
        known name.
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
        """Note a tool that is not a function. Raises UnsupportedFeature if strict."""
        if self._is_strict:
            text = f"tools of type {shown(repr(kind), 100)} are not supported: only functions are"
            raise UnsupportedFeature(text, param=f"{path}.type")
        self.note(f"tools.{kind}")


def _asks_for_nothing(value: Any) -> bool:
    return value is None or value in ("", [], {})
