"""`logs`: print the logs of the stack's processes, oldest first; with `--follow`, also new lines. Services
log JSON lines (`shared.log`), which are formatted; other lines are printed unchanged."""

import heapq
import itertools
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from services.stack.display import command_line, say
from services.stack.rundir import RunDirectory
from shared.errors import ConfigError

_TAIL_BYTES = 256 * 1024
"""Maximum number of bytes read of each log."""
_POLL_S = 0.25
_HIDDEN = {"time", "level", "logger", "service", "instance", "event", "exception"}


def logs(
    run: RunDirectory, console: Console, names: Sequence[str], *, lines: int = 40, follow: bool = False
) -> int:
    """Print the last `lines` of the named processes, or of all. Raise ConfigError if there is no log."""
    files = _files(run, names)
    ends: dict[str, int] = {}
    _show(console, files, _news(files, ends, whole_lines=follow)[-lines:])
    while follow:
        time.sleep(_POLL_S)
        files |= _files(run, names)  # picks up new workers
        _show(console, files, _news(files, ends))
    return 0


def _news(
    files: Mapping[str, Path], ends: dict[str, int], *, whole_lines: bool = True
) -> list[tuple[str, str, str]]:
    """Return (time, name, line) for all lines since `ends`, in order, and advance `ends`. For a file not in
    `ends`, return its tail. With `whole_lines`, leave unfinished lines for the next call."""
    told = []
    for name, path in files.items():
        size = path.stat().st_size if path.exists() else 0
        start = ends.get(name)
        if start is None:
            data = _tail(path, max(0, size - _TAIL_BYTES), size)
        else:
            data = _bytes(path, start if size >= start else 0, size)  # otherwise trimmed or restarted
        if whole_lines:
            data, _, torn = data.rpartition(b"\n")
            size -= len(torn)
        ends[name] = size
        told.append([(at, name, line) for at, line in _timed(data.decode("utf-8", "replace"))])
    return list(heapq.merge(*told, key=lambda row: row[0]))


def _show(console: Console, files: Mapping[str, Path], rows: Iterable[tuple[str, str, str]]) -> None:
    width = max(len(name) for name in files)
    for _, name, line in rows:
        say(console, f"{name:{width}} {line}")


def reason(path: Path) -> str | None:
    """Return the last error that a service logged without a traceback, or None."""
    size_bytes = path.stat().st_size if path.exists() else 0
    tail = _tail(path, max(0, size_bytes - _TAIL_BYTES), size_bytes).decode("utf-8", "replace")
    for line in reversed(tail.splitlines()):
        if line.startswith("error: "):
            return line.removeprefix("error: ")
        if " [FTL] " in line:  # nats-server's last words
            return line.partition(" [FTL] ")[2]
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("level") == "error" and "exception" not in entry:
            return str(entry.get("event"))
    return None


def _files(run: RunDirectory, names: Sequence[str]) -> dict[str, Path]:
    there = {path.stem: path for path in sorted(run.logs.glob("*.log"))}
    supervisor = run.path / "supervisor.log"
    if supervisor.exists():
        there["supervisor"] = supervisor
    if not there:
        raise ConfigError(f"{run.path} has no logs; `{command_line('up', run)}` starts a stack")
    for name in names:
        if name not in there:
            raise ConfigError(f"no log of {name!r}; there are {', '.join(there)}")
    return {name: there[name] for name in names} or there


def _tail(path: Path, start: int, end: int) -> bytes:
    """Read between two positions, starting at a whole line."""
    data = _bytes(path, start, end)
    return data.partition(b"\n")[2] if start else data


def _bytes(path: Path, start: int, end: int) -> bytes:
    if end <= start:
        return b""
    with path.open("rb") as file:
        file.seek(start)
        return file.read(end - start)


def _timed(text: str) -> Iterator[tuple[str, str]]:
    """Yield each line with its time as ISO text; a line without time takes the previous one."""
    at = ""
    for line in text.splitlines():
        at, shown = _shown(line, at)
        yield from zip(itertools.repeat(at), shown.splitlines() or [""], strict=False)


def _shown(line: str, at: str) -> tuple[str, str]:
    try:
        entry: dict[str, Any] = json.loads(line)
        at, level, event = entry["time"], entry["level"], entry["event"]
        clock = datetime.fromisoformat(at).astimezone()
    except (ValueError, LookupError, TypeError):
        return at, line
    fields = " ".join(f"{name}={value}" for name, value in entry.items() if name not in _HIDDEN)
    text = f"{clock:%H:%M:%S}.{clock.microsecond // 1000:03d} {level.upper():7} {event} {fields}".rstrip()
    return at, "\n".join([text, *str(entry.get("exception", "")).splitlines()])
