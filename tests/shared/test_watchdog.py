"""A process tells what it does, for how long, and what is stuck; time without a core is no time."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import watchdog
from shared.watchdog import Spell, WatchedPart

THING = f"thing-{os.getpid()}"
PROCESS = """
import asyncio, sys, time
from shared import watchdog
async def main():
    beating = asyncio.create_task(watchdog.beat())
    watchdog.part("lease").at("waits for x", None)
    await asyncio.sleep(0.7)
    print("up", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    time.sleep(100)
watchdog.start(sys.argv[1])
asyncio.run(main())
"""


@contextmanager
def running(**env: str) -> Iterator["subprocess.Popen[str]"]:
    """A process with an account; a line on its standard input blocks its event loop."""
    argv, pipe = [sys.executable, "-c", PROCESS, THING], subprocess.PIPE
    environ = {**os.environ, **env}
    with subprocess.Popen(argv, env=environ, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        try:
            yield process
        finally:
            process.kill()


async def asked(pid: int, within_s: float = 5.0) -> dict[str, Any]:
    async with asyncio.timeout(within_s):
        return await watchdog.ask(THING, pid)


async def probe() -> int:
    """What a container's liveness probe runs."""
    argv = [sys.executable, "-m", "shared.watchdog", THING]
    return (await asyncio.to_thread(subprocess.run, argv, check=False)).returncode


async def test_a_process_answers_beside_its_event_loop_and_not_while_it_is_stopped() -> None:
    with running() as process:
        first = await asked(process.pid)
        assert first["pid"] == process.pid and not first["stuck"]
        assert first["parts"]["lease"][0] == "waits for x" and "event loop" in first["parts"]
        assert process.pid in watchdog.pids(THING)
        assert await probe() == 0
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        async with asyncio.timeout(60):
            while not (stuck := (await asked(process.pid))["stuck"]):
                await asyncio.sleep(0.2)
        assert stuck.startswith("event loop: a turn for ")
        assert await probe() == 1
        process.send_signal(signal.SIGSTOP)
        await asyncio.to_thread(os.waitpid, process.pid, os.WUNTRACED)  # until it has stopped
        with pytest.raises(TimeoutError):
            await asked(process.pid, within_s=0.3)
    with pytest.raises(OSError):
        await asked(process.pid)


async def test_another_process_cannot_answer_for_it() -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(watchdog.address(THING, 1))
        listening.listen()
        asking = asyncio.create_task(asked(1))
        await asyncio.sleep(0)
        connected, _ = await asyncio.to_thread(listening.accept)
        with connected:
            connected.sendall(b"{}")
        with pytest.raises(ValueError, match="another process"):
            await asking


def test_systemd_hears_of_it_only_from_the_process_it_watches(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(1.5)
        told = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "5000000"}
        with running(**told):
            assert systemd.recv(100) == b"WATCHDOG=1"
        systemd.setblocking(False)
        until_empty(systemd)
        systemd.settimeout(1.5)
        with running(**told, WATCHDOG_PID="1"), pytest.raises(TimeoutError):
            systemd.recv(100)


def until_empty(systemd: socket.socket) -> None:
    try:
        while systemd.recv(100):
            pass
    except BlockingIOError:
        return


class Clock:
    """Time, and the time for which threads had no core."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = self.waited_s = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(watchdog, "_waits_s", lambda pid: {"1": self.waited_s})

    def run(self, part: WatchedPart, seconds: float, waiting: float = 0.0) -> None:
        for _ in range(round(seconds / 0.5)):
            self.now_s += 0.5
            self.waited_s += 0.5 * waiting
            part.measure()


def stuck(part: WatchedPart) -> bool:
    return part.is_stuck


def test_a_step_may_take_as_long_as_was_foreseen_and_no_wait_for_a_core_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    engine = WatchedPart("engine")
    engine.at("a step", lambda: 20 * 60.0)
    clock.run(engine, 1199)
    assert not stuck(engine)
    clock.run(engine, 2)
    assert stuck(engine)
    engine.at("a step", lambda: 5.0)
    clock.run(engine, 5)
    assert not stuck(engine)
    clock.run(engine, 8, waiting=0.95)
    assert not stuck(engine), "a machine at load 20"
    clock.now_s += 3600.0
    clock.run(engine, 0.5)
    assert not stuck(engine), "it slept"
    clock.run(engine, 5)
    assert stuck(engine)
    engine.at("commands")
    clock.run(engine, 0.5)
    assert not stuck(engine)


def test_a_debugger_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    part = WatchedPart("event loop")
    part.at("a turn")
    monkeypatch.setattr("threading.gettrace", lambda: print)
    clock.run(part, 600)
    assert not stuck(part)


@given(gaps=st.lists(st.tuples(st.floats(0, 30), st.floats(0, 1)), max_size=40))
def test_a_spell_is_never_longer_than_the_time_it_could_have_run(gaps: list[tuple[float, float]]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        clock, most_s = Clock(monkeypatch), 0.0
        spell = Spell()
        for gap_s, share in gaps:
            clock.now_s += gap_s
            clock.waited_s += gap_s * share
            before_s = spell.lasting_s
            lasting_s = spell.look("self", is_new=False)
            most_s += gap_s * (1 - share)
            assert before_s <= lasting_s <= most_s + 1e-9
        assert spell.look("self", is_new=True) == 0.0
