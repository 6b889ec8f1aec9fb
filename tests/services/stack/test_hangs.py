"""The supervisor replaces what hangs, and nothing that loads, is debugged or has no core. Real processes.

Waits for the five seconds after which a process counts as hung.
"""

import asyncio
import ctypes
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from services.stack.nats_server import binary
from services.stack.probes import greeting, listens, lives, seed_answers
from services.stack.process import is_traced
from services.stack.supervisor import Child, ChildSpec, ChildState
from shared import watchdog
from shared.config import BusConfig
from tests.patience import until
from tests.services.stack.test_supervisor import ENV, staged

ROOT = Path(__file__).resolve().parents[3]
SERVICE = f"""
import asyncio, sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
from shared import watchdog
name, allowed_s = sys.argv[1], float(sys.argv[2])
def work():
    watchdog.part("engine").at("a step", allowed_s)
    time.sleep(1000)
watchdog.start(name)
threading.Thread(target=work, daemon=True).start()
asyncio.run(watchdog.beat())
"""
_SEIZE, _INTERRUPT = 0x4206, 0x4207


def service(name: str, allowed_s: float = 1000.0) -> ChildSpec:
    argv = (sys.executable, "-c", SERVICE, name, str(allowed_s))
    return ChildSpec(name, argv, ENV, partial(lives, moment_s=0.0), partial(watchdog.ask, name))


async def answering(*children: Child) -> None:
    await until(lambda: all(child.account is not None for child in children))


async def test_what_is_stopped_or_stuck_is_replaced_and_what_takes_as_long_as_foreseen_is_not(
    tmp_path: Path,
) -> None:
    specs = (service("stopped-0"), service("stuck-0", 5.0), service("slow-0", 60.0))
    async with staged(tmp_path, *specs) as stage:
        stopped, stuck, slow = (stage.supervisor.children[spec.name] for spec in specs)
        await answering(stopped, stuck, slow)
        began_s = time.monotonic()
        os.kill(stage.pid("stopped-0"), signal.SIGSTOP)
        await until(lambda: stopped.silence.lasting_s > 2.0)
        row = stopped.row()
        assert row["silent_s"] >= 2.0 and row["state"] == "ready"
        await until(lambda: stopped.restarts == 1 and stopped.state is ChildState.READY)
        assert time.monotonic() - began_s > 4.5  # its last answer may have come a little before
        assert stopped.last_exit is not None and stopped.last_exit.startswith("hung: no answer for ")
        await until(lambda: stuck.restarts >= 1)
        assert stuck.last_exit is not None and stuck.last_exit.startswith("hung: engine: a step for ")
        assert (slow.restarts, slow.silence.lasting_s) == (0, 0.0)
        await answering(stopped)
        assert stopped.row()["account"]["stuck"] == ""
    assert any(line.startswith("stopped-0 hangs (no answer for ") for line in stage.said)


async def test_nats_and_the_seed_are_asked_too(tmp_path: Path, free_port: int) -> None:
    config = BusConfig(url=f"nats://127.0.0.1:{free_port}")
    listening = tmp_path / "seed.sock"
    seed = (sys.executable, "-m", "services.stack.seed", str(listening), "json")
    specs = (
        ChildSpec(
            "nats",
            (binary(), "-p", str(free_port)),
            ENV,
            partial(listens, free_port),
            partial(greeting, config),
        ),
        ChildSpec("seed", seed, ENV, partial(listens, listening), partial(seed_answers, listening)),
    )
    async with staged(ROOT, *specs, logs=tmp_path) as stage:
        children = [*stage.supervisor.children.values()]
        await answering(*children)
        os.kill(stage.pid("nats"), signal.SIGSTOP)
        listening.unlink()
        await until(lambda: all(c.restarts == 1 and c.state is ChildState.READY for c in children))
        assert listening.exists(), "a seed without its socket is of no use"


@pytest.mark.skipif(sys.platform != "linux", reason="ptrace as Linux has it")
async def test_a_debugger_holds_a_process_for_as_long_as_it_likes(tmp_path: Path) -> None:
    async with staged(tmp_path, service("held-0")) as stage:
        child = stage.supervisor.children["held-0"]
        await answering(child)
        pid = stage.pid("held-0")
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.ptrace(_SEIZE, pid, 0, 0) != 0:
            pytest.skip("this process may not trace others")
        libc.ptrace(_INTERRUPT, pid, 0, 0)
        assert is_traced(pid)
        await asyncio.sleep(7.0)
        assert (child.restarts, child.silence.lasting_s) == (0, 0.0), stage.said
