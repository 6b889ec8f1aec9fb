"""The generated configuration, judged by the real server."""

import asyncio
import os
import subprocess
from pathlib import Path

from pydantic import SecretStr

from services.stack import nats_server, ports
from services.stack.probes import TcpProbe
from services.stack.process import ChildProcess
from services.stack.rundir import RunDirectory
from shared.bus import Bus
from shared.config import BusConfig
from shared.errors import BusUnavailable


def test_the_server_accepts_its_configuration(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "a run")
    run.create()
    path = run.path / "nats.conf"
    nats_server.write_config(path, 4222, run.path / "nats", run.credentials())
    checked = subprocess.run(
        [nats_server.binary(), "-c", str(path), "-t"], capture_output=True, timeout=20, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    assert path.stat().st_mode & 0o077 == 0


async def test_only_its_user_gets_in_and_payloads_are_large(tmp_path: Path) -> None:
    run, port = RunDirectory(tmp_path), ports.free_port()
    run.create()
    path, credentials = run.path / "nats.conf", run.credentials()
    nats_server.write_config(path, port, run.path / "nats", credentials)
    server = ChildProcess.start(
        [nats_server.binary(), "-c", str(path)], os.environ, tmp_path, tmp_path / "log"
    )
    try:
        async with asyncio.timeout(10.0):
            while await TcpProbe(port).obstacle(0.0):
                await asyncio.sleep(0.01)
        url = f"nats://127.0.0.1:{port}"
        insider = BusConfig(
            url=url, user=credentials.nats_user, password=SecretStr(credentials.nats_password)
        )
        bus = await Bus.connect(insider, service="tester", instance="tester-0")
        assert bus.connected
        await bus.close()
        try:
            await Bus.connect(
                BusConfig(url=url, connect_timeout_s=0.5), service="tester", instance="tester-1"
            )
        except BusUnavailable:
            return
        raise AssertionError("a stranger got in")
    finally:
        server.kill()
        await server.wait()
