"""Each service runs alone: it starts, answers `status`, and ends cleanly on SIGTERM."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared import subjects
from shared.bus import Bus
from shared.config import BusConfig
from shared.messages.base import Empty
from shared.messages.reports import ServiceStatus
from tests.stack.running import ROOT

pytestmark = pytest.mark.stack
START_S = 40.0


@asynccontextmanager
async def process(*argv: str, env: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """A child that is certainly gone afterwards."""
    child = await asyncio.create_subprocess_exec(
        *argv, cwd=ROOT, env=env, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def status_of(bus: Bus, service: str) -> ServiceStatus:
    """The service's answer, asked for until it is there."""
    async with asyncio.timeout(START_S):
        while True:
            found = await bus.gather(
                subjects.status(service), Empty(), ServiceStatus, deadline_s=1.0, expected=1
            )
            if found:
                return found[0]
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("service", subjects.SERVICES)
async def test_runs_alone(bus_config: BusConfig, service: str) -> None:
    env = {**os.environ, "KVASIR_BUS__URL": bus_config.url}
    bus = await Bus.connect(bus_config, service="tester", instance="tester-0")
    flags = ("--port", "0") if service == "gateway" else ()
    argv = (sys.executable, "-m", f"services.{service}", "--instance", f"{service}-9", *flags)
    try:
        async with process(*argv, env=env) as child:
            status = await status_of(bus, service)
            assert (status.service, status.instance) == (service, f"{service}-9")
            child.send_signal(signal.SIGTERM)
            async with asyncio.timeout(15):
                _, errors = await child.communicate()
            assert child.returncode == 0, errors.decode()
    finally:
        await bus.close()


LOADS = """
import sys, time
sys.path.insert(0, {root!r})
if sys.orig_argv[1:3] == ["-m", "services.worker"]:
    from services.worker import service
    service.make_engine = lambda config, progress: time.sleep(10_000)
"""


async def test_a_worker_that_loads_ends_when_told_to(bus_config: BusConfig, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LOADS.format(root=str(ROOT)))
    env = {**os.environ, "KVASIR_BUS__URL": bus_config.url, "PYTHONPATH": str(tmp_path)}
    bus = await Bus.connect(bus_config, service="tester", instance="tester-0")
    try:
        async with process(sys.executable, "-m", "services.worker", env=env) as child:
            assert "loading" in (await status_of(bus, "worker")).details
            child.send_signal(signal.SIGTERM)
            async with asyncio.timeout(15):
                _, errors = await child.communicate()
            assert child.returncode == 0, errors.decode()
    finally:
        await bus.close()


async def test_an_unknown_setting_is_named() -> None:
    argv = (sys.executable, "-m", "services.ledger", "--colour", "blue")
    async with process(*argv, env=dict(os.environ)) as child:
        async with asyncio.timeout(30):
            _, errors = await child.communicate()
        assert child.returncode not in (0, None) and "colour" in errors.decode()
        assert "Traceback" not in errors.decode()
