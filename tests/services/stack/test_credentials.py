"""`credentials NAME`: a further instance is let onto the bus of a running stack, and nobody else notices."""

import asyncio
import io
import json
from pathlib import Path

import pytest
from pydantic import SecretStr
from rich.console import Console

from services.stack.nats_server import credentials
from services.stack.rundir import RunDirectory
from shared.bus import Bus
from shared.config import BusConfig, ServiceConfig, load
from shared.errors import BusUnavailable, ConfigError
from tests.patience import until
from tests.services.stack.secured import secured_server


def told(run: RunDirectory, name: str) -> BusConfig:
    """What the printed lines say to the process that is started with them."""
    console = Console(file=io.StringIO(), soft_wrap=True)
    assert credentials(run, name, console) == 0
    assert isinstance(console.file, io.StringIO)
    printed = dict(line.split("=", 1) for line in console.file.getvalue().splitlines())
    return load(ServiceConfig, "worker", argv=(), environ=printed).bus


async def test_another_worker_is_let_in_and_nobody_is_thrown_out(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    async with secured_server(tmp_path) as access:
        assert run.acquire()
        there = await Bus.connect(access.config("worker-0"), service="worker", instance="worker-0")
        guessed = BusConfig(
            url=access.url, user="worker-7", password=SecretStr("guess"), connect_timeout_s=0.4
        )
        with pytest.raises(BusUnavailable):
            await Bus.connect(guessed, service="worker", instance="worker-7")
        config = await asyncio.to_thread(told, run, "worker-7")
        assert config.user == "worker-7"
        assert await asyncio.to_thread(told, run, "worker-7") == config, "asked again: the same user"
        late = await Bus.connect(config, service="worker", instance="worker-7")
        assert there.connected and there.reconnections == 0
        for bus in (there, late):
            await bus.close()
        run.release()


async def test_a_password_that_became_known_is_replaced_and_who_has_it_is_thrown_out(tmp_path: Path) -> None:
    """What 0019 tells an operator to do: take it out of the file, and ask for another."""
    run = RunDirectory(tmp_path)
    async with secured_server(tmp_path) as access:
        assert run.acquire()
        other = await Bus.connect(access.config("worker-0"), service="worker", instance="worker-0")
        known = await asyncio.to_thread(told, run, "worker-7")
        thief = await Bus.connect(known, service="worker", instance="worker-7")
        kept = json.loads(run.credentials_file.read_text())
        del kept["nats_passwords"]["worker-7"]
        run.credentials_file.write_text(json.dumps(kept))
        fresh = await asyncio.to_thread(told, run, "worker-7")
        assert fresh.password != known.password
        await until(lambda: not thief.connected)
        with pytest.raises(BusUnavailable):
            await Bus.connect(
                known.model_copy(update={"connect_timeout_s": 0.4}), service="worker", instance="worker-7"
            )
        worker = await Bus.connect(fresh, service="worker", instance="worker-7")
        assert other.connected and other.reconnections == 0
        for bus in (other, worker, thief):
            await bus.close()
        run.release()


async def test_a_name_of_no_service_and_a_stack_that_does_not_run_are_said(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.create()
    with pytest.raises(ConfigError, match="janitor-0"):
        credentials(run, "janitor-0", Console(file=io.StringIO()))
    with pytest.raises(ConfigError, match="nothing runs"):
        credentials(run, "worker-7", Console(file=io.StringIO()))
