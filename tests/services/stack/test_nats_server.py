"""The generated configuration, judged by the real server."""

import asyncio
from pathlib import Path

import nats.errors
import nats.js.errors
import pytest
from nats.js.api import StorageType
from prometheus_client import CollectorRegistry

from services.stack import nats_server
from services.stack.access import BusAccess
from services.stack.authority import make_certificate
from services.stack.certificates import certificate_for
from services.stack.config import StackConfig
from services.stack.rundir import RunDirectory
from shared.bus import Bus
from shared.config import BusConfig
from shared.errors import BusUnavailable, ConfigError, MessageTooLarge
from shared.messages.reports import ServiceStatus
from shared.subjects import LEASE_BUCKET, SCHEDULER_ANNOUNCED
from tests.services.stack.secured import secured_server


async def connect(config: BusConfig, user: str) -> Bus:
    service = user.partition("-")[0]
    return await Bus.connect(config, service=service, instance=user, registry=CollectorRegistry())


def test_the_file_is_checked_and_private(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / 'a "run"')
    run.create()
    path, store = run.path / "nats.conf", run.path / "nats"
    access = BusAccess.to_local(4222, run.credentials(), None)
    nats_server.write_config(path, StackConfig(), access, store)
    assert path.stat().st_mode & 0o077 == 0
    make_certificate(tmp_path / "tls")
    (tmp_path / "tls" / "server-key.pem").write_text("no key")
    config = StackConfig(
        nats_tls_cert=tmp_path / "tls" / "server.pem", nats_tls_key=tmp_path / "tls" / "server-key.pem"
    )
    with pytest.raises(ConfigError, match=r"does not accept .*nats\.conf"):
        unusable = certificate_for(config, tmp_path)
        nats_server.write_config(path, config, BusAccess.to_local(4222, run.credentials(), unusable), store)


@pytest.mark.parametrize("tls", [False, True])
async def test_no_password_no_entry(tmp_path: Path, tls: bool) -> None:
    async with secured_server(tmp_path, StackConfig(tls=tls)) as access:
        insider = access.config("scheduler-0", connect_timeout_s=10.0)
        bus = await connect(insider, "scheduler-0")
        assert bus.connected
        await bus.close()
        for stranger in (
            {"user": None, "password": None},
            {"user": "worker-0"},
            {"user": "kvasir"},
            {"user": "admin", "password": None},
        ):
            config = insider.model_copy(update={**stranger, "connect_timeout_s": 0.4})
            with pytest.raises(BusUnavailable, match="no NATS connection"):
                await connect(config, "scheduler-0")


async def test_tls_lets_nobody_in_without_it(tmp_path: Path) -> None:
    async with secured_server(tmp_path, StackConfig(tls=True)) as access:
        assert access.url.startswith("tls://")
        plain = access.config("scheduler-0", connect_timeout_s=0.4).model_copy(
            update={"url": access.url.replace("tls://", "nats://"), "tls_ca": None}
        )
        with pytest.raises(BusUnavailable):
            await connect(plain, "scheduler-0")


async def test_limits_are_those_of_the_settings(tmp_path: Path) -> None:
    config = StackConfig(nats_max_payload_bytes=64 * 1024, nats_max_connections=16)
    async with secured_server(tmp_path, config) as access:
        buses = [await connect(access.config("scheduler-0"), "scheduler-0") for _ in range(16)]
        with pytest.raises(BusUnavailable, match="no NATS connection"):
            await connect(access.config("scheduler-0", connect_timeout_s=0.5), "scheduler-0")
        status = ServiceStatus(
            service="x", instance="x-0", incarnation=1, uptime_s=1.0, details={"x": "x" * 70_000}
        )
        with pytest.raises(MessageTooLarge):
            await buses[0].publish(SCHEDULER_ANNOUNCED, status)
        await buses.pop().close()
        buses.append(await connect(access.config("scheduler-0"), "scheduler-0"))
        for bus in buses:
            await bus.close()


async def test_the_lease_is_the_only_stream(tmp_path: Path) -> None:
    async with secured_server(tmp_path) as access:
        bus = await connect(access.config("scheduler-0"), "scheduler-0")
        async with asyncio.timeout(10):
            await bus.acquire_lease("scheduler", ttl_s=1.0)
        context = bus._link.client.jetstream(timeout=0.5)
        with pytest.raises((nats.errors.TimeoutError, nats.js.errors.APIError)):
            await context.create_key_value(bucket=f"{LEASE_BUCKET}2", storage=StorageType.FILE)
        await bus.close()
