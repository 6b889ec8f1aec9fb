"""`logs`: what the stack's processes have logged, oldest first; with `--follow` also what comes.

Services log JSON lines (`shared.log`), which are shown as a person reads them; other lines as they are.
"""

import heapq
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from services.stack.display import command_line, say
from services.stack.rundir import RunDirectory
from shared.errors import ConfigError

_TAIL_BYTES = 256 * 1024
"""Of each log: what is older is in the file."""
_POLL_S = 0.25
_HIDDEN = {"time", "level", "logger", "service", "instance", "event", "exception"}


def logs(
    run: RunDirectory, console: Console, names: Sequence[str], *, lines: int = 40, follow: bool = False
) -> int:
    """The last `lines` of the named processes, or of all. Raises ConfigError where there are none."""
    files = _files(run, names)
    width = max(len(name) for name in files)
    ends = {name: path.stat().st_size for name, path in files.items()}
    streams = [_read(path, max(0, ends[name] - _TAIL_BYTES), ends[name]) for name, path in files.items()]
    told = [
        [(at, name, line) for at, line in _timed(text)] for name, text in zip(files, streams, strict=True)
    ]
    for _, name, line in list(heapq.merge(*told, key=lambda row: row[0]))[-lines:]:
        say(console, f"{name:{width}} {line}")
    while follow:
        time.sleep(_POLL_S)
        for name, path in files.items():
            size = path.stat().st_size if path.exists() else 0
            start = ends[name] if size >= ends[name] else 0  # trimmed, or begun anew
            ends[name] = size
            for _, line in _timed(_read(path, start, size)):
                say(console, f"{name:{width}} {line}")
    return 0


def reason(path: Path) -> str | None:
    """The last error that a service has logged without a traceback, in its words; None without one."""
    size_bytes = path.stat().st_size if path.exists() else 0
    for line in reversed(_read(path, max(0, size_bytes - _TAIL_BYTES), size_bytes).splitlines()):
        if line.startswith("error: "):
            return line.removeprefix("error: ")
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


def _read(path: Path, start: int, end: int) -> str:
    """Whole lines between two positions."""
    if end <= start:
        return ""
    with path.open("rb") as file:
        file.seek(start)
        text = file.read(end - start).decode("utf-8", "replace")
    return text.partition("\n")[2] if start else text


def _timed(text: str) -> Iterator[tuple[str, str]]:
    """Each line with when it was logged, as ISO text; one that does not say follows the one before."""
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
