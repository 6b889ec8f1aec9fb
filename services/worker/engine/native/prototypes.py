"""Telling ctypes what the library's functions take and give."""

import ctypes
from collections.abc import Mapping
from typing import Any

Prototype = tuple[Any, tuple[Any, ...]]
"""Result (None: nothing) and arguments."""


def declare(library: ctypes.CDLL, prototypes: Mapping[str, Prototype]) -> None:
    """Raises AttributeError for a function that the library does not have."""
    for name, (result, arguments) in prototypes.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
