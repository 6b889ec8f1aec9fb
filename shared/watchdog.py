"""Account of this process's own progress, for its supervisor, a container's liveness probe, or systemd.

Each thread that must not stop owns a `Part`: its current activity, and how long that may take. A separate
thread measures them and answers on an abstract Unix socket, so neither bus nor disk is involved. The process
does not end itself: whoever asks replaces it if it does not answer, or reports itself stuck.
`python -m shared.watchdog INSTANCE` asks, prints the account, and exits 1 if so.
"""

import asyncio
import contextlib
import faulthandler
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared.log import get_logger

STUCK_S = 5.0
"""Time without an answer, or without a turn of the event loop, after which a process is replaced."""
BEAT_S = 0.5
_LONGEST_GAP_S = 3.0
"""A longer gap between two looks does not count: the observer was stopped."""
_log = get_logger("watchdog")


def _waits_s(pid: int | str) -> dict[str, float]:
    """Return for each thread of a process how long it was ready to run but had no core; empty if the kernel
    does not tell."""
    waits: dict[str, float] = {}
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                waits[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    return waits


class Spell:
    """Time in which a process made no progress, although all of its threads and its observer had a core. Any
    thread counts, since the one that should make progress may wait for what another one holds."""

    def __init__(self) -> None:
        self.lasting_s = 0.0
        self._looked_s = time.monotonic()
        self._waits_s: dict[str, float] | None = None
        """None: there was progress at the last look."""

    @property
    def is_lasting(self) -> bool:
        """Whether there was no progress at the last look."""
        return self._waits_s is not None

    def look(self, pid: int | str, *, is_new: bool) -> float:
        """Return the time so far; `is_new`: there was progress since the last look."""
        now_s = time.monotonic()
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        if is_new:
            self.lasting_s, self._waits_s = 0.0, None
            return 0.0
        before, self._waits_s = self._waits_s, _waits_s(pid)
        if before is not None and gap_s <= _LONGEST_GAP_S:
            lost = (waited - before.get(thread, 0.0) for thread, waited in self._waits_s.items())
            self.lasting_s += max(0.0, gap_s - max(lost, default=0.0))
        return self.lasting_s


class WatchedPart:
    """Progress of one thread, or a state of the process such as its lease."""

    def __init__(self, name: str) -> None:
        self.name, self.doing, self.spell = name, "", Spell()
        self._allowed: float | Callable[[], float] | None = None
        self._turns = self._seen_turns = 0

    def at(self, doing: str, allowed_s: float | Callable[[], float] | None = STUCK_S) -> None:
        """Record that the calling thread begins something that may take `allowed_s`; None: any time."""
        self.doing, self._allowed = doing, allowed_s
        self._turns += 1

    @property
    def is_stuck(self) -> bool:
        """Whether its activity takes longer than allowed, as of the last `measure`."""
        lasting_s, allowed = self.spell.lasting_s, self._allowed
        if allowed is None or lasting_s < STUCK_S or _is_debugged():
            return False
        return lasting_s >= (allowed() if callable(allowed) else allowed)

    def measure(self) -> None:
        """Advance the time of its activity; called every `BEAT_S`."""
        turns = self._turns
        self.spell.look("self", is_new=turns != self._seen_turns)
        self._seen_turns = turns


_parts: dict[str, WatchedPart] = {}


def part(name: str) -> WatchedPart:
    """Return a new part, which replaces an earlier one of this name."""
    _parts[name] = WatchedPart(name)
    return _parts[name]


def account() -> dict[str, Any]:
    """Return the stuck parts in words, and each part's activity with its time in seconds."""
    parts = list(_parts.values())
    stuck = [f"{one.name}: {one.doing} for {one.spell.lasting_s:.0f} s" for one in parts if one.is_stuck]
    told = {one.name: (one.doing, round(one.spell.lasting_s, 1)) for one in parts}
    return {"pid": os.getpid(), "stuck": "; ".join(stuck), "parts": told}


def _is_debugged() -> bool:
    monitoring = getattr(sys, "monitoring", None)
    has_tool = monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None
    return has_tool or threading.gettrace() is not None


def start(instance: str) -> None:
    """Answer, and tell systemd, in a thread that lives as long as the process. Without abstract sockets (they
    are Linux's), only systemd is told."""
    listening = None
    with contextlib.suppress(OSError, AttributeError):
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(address(instance, os.getpid()))
        listening.listen()
        listening.settimeout(BEAT_S)
    threading.Thread(target=_serve, args=(listening,), name="watchdog", daemon=True).start()


async def beat() -> None:
    """Record turns of the event loop until cancelled."""
    loop = part("event loop")
    while True:
        loop.at("a turn")
        await asyncio.sleep(BEAT_S)


def _serve(listening: socket.socket | None) -> None:
    measured_s, was_stuck = 0.0, False
    while True:
        if listening is None:
            time.sleep(BEAT_S)
        else:
            with contextlib.suppress(OSError):
                connected, _ = listening.accept()
                with connected:
                    connected.setblocking(False)
                    connected.send(json.dumps(account()).encode())
        if time.monotonic() - measured_s < BEAT_S:
            continue
        measured_s = time.monotonic()
        for one in list(_parts.values()):
            one.measure()
        stuck = account()["stuck"]
        if not stuck:
            _tell_systemd()
        elif not was_stuck:
            _log.error("stuck: %s; the stacks of all threads follow", stuck)
            with contextlib.suppress(OSError, ValueError):
                faulthandler.dump_traceback()
        was_stuck = bool(stuck)


def _tell_systemd() -> None:
    """Send WATCHDOG=1 if systemd watches this process; see sd_watchdog_enabled(3)."""
    to, own_pid = os.environ.get("NOTIFY_SOCKET", ""), str(os.getpid())
    if not to or "WATCHDOG_USEC" not in os.environ or os.environ.get("WATCHDOG_PID", own_pid) != own_pid:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as speaking:
        speaking.sendto(b"WATCHDOG=1", "\0" + to[1:] if to.startswith("@") else to)


def address(instance: str, pid: int) -> str:
    """Return the abstract address of a process's account."""
    return f"\0kvasir-{os.getuid()}-{instance}-{pid}"


async def ask(instance: str, pid: int) -> dict[str, Any]:
    """Return a process's account. Raise OSError, or ValueError for an answer of another process; the caller
    sets a deadline."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as asking:
        asking.setblocking(False)
        await loop.sock_connect(asking, address(instance, pid))
        told = b""
        while data := await loop.sock_recv(asking, 65_536):
            told += data
        if not _is_of(asking, pid):
            raise ValueError(f"another process answers for {instance}")
    found: dict[str, Any] = json.loads(told)
    return found


def pids(instance: str) -> list[int]:
    """Return the processes of this user that listen for an instance, in this network namespace."""
    name, found = address(instance, 0).replace("\0", "@")[:-1], list[int]()
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/unix").read_text().splitlines():
            pid = line.rpartition(name)[2]
            if name in line and pid.isdigit() and int(pid) not in found and _listens(instance, int(pid)):
                found.append(int(pid))
    return found


def _listens(instance: str, pid: int) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asking:
        asking.setblocking(False)
        asking.connect(address(instance, pid))
        return _is_of(asking, pid)
    return False


def _is_of(connected: socket.socket, pid: int) -> bool:
    """Whether that process is at the other end: anyone may bind an abstract address."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return bool(struct.unpack("3i", credentials)[0] == pid)


async def _probe(instance: str) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, TimeoutError):
        async with asyncio.timeout(STUCK_S):
            for pid in pids(instance):
                return await ask(instance, pid)
    return {"stuck": "no answer"}


if __name__ == "__main__":
    print(json.dumps(told := asyncio.run(_probe(sys.argv[1]))))
    sys.exit(bool(told["stuck"]))
