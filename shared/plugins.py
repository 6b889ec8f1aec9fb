"""Plugins: parts of a service from an installed package or a file.

    mine               a name that an installed package declares as an entry point
    my_file.py:Mine    a class in a file; a relative path starts at the current directory

Only configuration can name a plugin, never a client. A plugin runs with the rights of the service.
"""

import inspect
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from hashlib import blake2b
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any, TypeVar

from shared.errors import ConfigError, PolicyFailed

T = TypeVar("T")
Factory = Callable[..., T]
PLUGIN_SETTINGS = {
    "scheduler": "policy",
    "placement": "policy",
    "predictor": "model",
    "worker": "prefix_cache.eviction",
}
"""Setting that may name a file, by service."""
_SUFFIX = ".py:"


def is_file(name: str) -> bool:
    """Return True if `name` is a class in a file, such as `my_file.py:Mine`."""
    return _SUFFIX in name or name.endswith(".py")


def absolute(name: str) -> str:
    """Return the name with an absolute path, valid in any working directory."""
    if not is_file(name):
        return name
    path, class_name = _parts(name)
    return f"{path.expanduser().absolute()}:{class_name}"


def label(name: str) -> str:
    """Return the name without folders, for display."""
    return name if not is_file(name) else f"{_parts(name)[0].name}:{_parts(name)[1]}"


def _parts(name: str) -> tuple[Path, str]:
    path, _, class_name = name.partition(_SUFFIX)
    return Path(path.removesuffix(".py") + ".py"), class_name


@dataclass(frozen=True)
class PluginKind:
    """One kind of plugin."""

    group: str
    """Entry-point group."""
    noun: str
    """Noun for error messages."""
    param: str
    """Setting that names the plugin."""
    methods: tuple[str, ...]
    """Required methods."""

    def names(self, built_in: Mapping[str, object] = {}) -> list[str]:  # default is never modified
        """Return all names that `find` accepts besides files, sorted."""
        return sorted({*built_in, *self._installed()})

    def find(self, name: str, built_in: Mapping[str, Factory[T]], others: tuple[str, ...] = ()) -> Factory[T]:
        """Return the factory of that name. Built-in names take precedence. `others` are further names for the
        error message. Raise ConfigError."""
        if name in built_in:
            return built_in[name]
        found: Factory[T]
        if is_file(name):
            found = self._in_file(name)
        else:
            point = self._installed().get(name)
            if point is None:
                raise self._error(self._unknown(name, sorted({*self.names(built_in), *others})))
            try:
                found = point.load()
            except Exception as error:  # importing runs arbitrary code
                raise self._error(f"{name!r} ({point.value}) cannot be loaded: {told(error)}") from error
        self._check(name, found)
        return found

    def made(self, name: str, make: Callable[[], T]) -> T:
        """Return `make()`. Raise ConfigError if it fails or the result lacks a method."""
        try:
            found = make()
        except ConfigError:
            raise
        except Exception as error:
            raise self._error(f"{name!r} cannot be made: {told(error)}") from error
        self._check_methods(name, found)
        return found

    def _installed(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self.group)}

    def _unknown(self, name: str, known: list[str]) -> str:
        close = get_close_matches(name, known, n=1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        return f"{name!r} is not known; {meant}write one of: {', '.join(known)}, or FILE.py:CLASS"

    def _in_file(self, name: str) -> Factory[T]:
        path, class_name = _parts(absolute(name))
        module = self._module(path)
        own = [
            key
            for key, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == module.__name__
        ]
        if class_name in vars(module) and class_name.isidentifier():
            found: Factory[T] = getattr(module, class_name)
            return found
        there = ", ".join(own) or "none"
        raise self._error(f"{path} has no class {class_name!r}; its classes are: {there}")

    def _module(self, path: Path) -> ModuleType:
        """Import the file; each version of its content runs once."""
        try:
            source = path.read_bytes()
        except OSError as error:
            raise self._error(f"there is no file {path} that can be read: {error.strerror}") from None
        name = f"{path.stem}_{blake2b(str(path).encode() + source, digest_size=8).hexdigest()}"
        if name in sys.modules:
            return sys.modules[name]
        spec = spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None  # it ends in .py
        module = sys.modules[name] = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise self._error(f"{path} cannot be loaded: {told(error)}") from error
        return module

    def _check(self, name: str, found: Any) -> None:
        if not callable(found):
            raise self._error(f"{name!r} is neither a class nor a function that makes one")
        if inspect.isclass(found):
            self._check_methods(name, found)

    def _check_methods(self, name: str, found: object) -> None:
        missing = [method for method in self.methods if not callable(getattr(found, method, None))]
        if missing:
            raise self._error(f"{name!r} lacks what a {self.noun} needs: {', '.join(missing)}")

    def _error(self, text: str) -> ConfigError:
        return ConfigError(f"{self.noun} {text}", param=self.param)


def told(error: BaseException) -> str:
    """Format an exception in one line, with the place that raised it."""
    lines = extract_tb(error.__traceback__)
    where = f" ({Path(lines[-1].filename).name}:{lines[-1].lineno})" if lines else ""
    if isinstance(error, SyntaxError):
        where = f" ({Path(error.filename or '').name}:{error.lineno})"
    text = str(error) if not isinstance(error, SyntaxError) else error.msg
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}"


_TOLD_S = 60.0
"""Time for which a failure counts as recent."""
_MOST_NOTED = 1000


class PluginFaults:
    """Recent failures of a plugin, shown by `status`."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=_MOST_NOTED)
        self._latest = ""

    def note(self, what: str, method: str, error: BaseException, now_s: float) -> PolicyFailed:
        """Record that `what` raised `error` in `method`; return the error for its callers."""
        failure = PolicyFailed(f"{what} raised {told(error)} in {method}")
        self.count(failure, now_s)
        return failure

    def count(self, failure: PolicyFailed, now_s: float) -> bool:
        """Record a failure. Return True if it is the first of its kind within a minute."""
        is_new = self.text(now_s) == "" or failure.message != self._latest
        self._times_s.append(now_s)
        self._latest = failure.message
        return is_new

    def text(self, now_s: float) -> str:
        """Describe recent failures; empty if there were none within a minute."""
        while self._times_s and now_s - self._times_s[0] > _TOLD_S:
            self._times_s.popleft()
        count = len(self._times_s)
        times = "once" if count == 1 else f"{count} times"
        return f"{self._latest}; {times} within a minute" if count else ""
