"""TLS: with whom, and with nobody else."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from services.stack.authority import make_certificate
from shared.bus import Bus
from shared.bus.link import tls_options
from shared.config import BusConfig
from shared.errors import BusUnavailable, ConfigError
from tests.conftest import MakeServer
from tests.shared.bus.desk import FILE_LISTENER, FILED, Desk, Note, until


def encrypted(directory: Path, *, first: bool) -> str:
    make_certificate(directory)
    files = f'cert_file: "{directory / "server.pem"}", key_file: "{directory / "server-key.pem"}"'
    return f"tls {{ {files}, handshake_first: {str(first).lower()} }}"


async def connected(config: BusConfig) -> Bus:
    return await Bus.connect(config, service="desk", instance="desk-0", registry=CollectorRegistry())


@pytest.mark.parametrize("first", [True, False])
async def test_messages_pass_and_strangers_do_not(
    make_server: MakeServer, tmp_path: Path, first: bool
) -> None:
    server = make_server(jetstream=False, extra_config=encrypted(tmp_path / "tls", first=first)).start()
    url = server.url.replace("nats://", "tls://")
    ca = str(tmp_path / "tls" / "ca.pem")
    bus, desk = await connected(BusConfig(url=url, tls_ca=ca, tls_handshake_first=first)), Desk()
    await bus.attach([FILE_LISTENER], desk)
    await bus.publish(FILED, Note(number=1))
    await until(lambda: desk.filed == [1])
    server.kill()
    await until(lambda: not bus.connected)
    server.start()
    await bus.publish(FILED, Note(number=2))
    await until(lambda: desk.filed == [1, 2])
    await bus.close()
    unknown = BusConfig(url=url, connect_timeout_s=0.5, tls_handshake_first=first)
    with pytest.raises(BusUnavailable, match="certificate verify failed"):
        await connected(unknown)
    make_certificate(tmp_path / "other")
    with pytest.raises(BusUnavailable, match="certificate verify failed"):
        await connected(unknown.model_copy(update={"tls_ca": str(tmp_path / "other" / "ca.pem")}))


async def test_a_server_without_tls_gets_no_password(make_server: MakeServer) -> None:
    server = make_server(jetstream=False).start()
    config = BusConfig(url=server.url.replace("nats://", "tls://"), connect_timeout_s=0.5)
    with pytest.raises(BusUnavailable, match="offers no TLS"):
        await connected(config)


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    assert tls_options(BusConfig()) == {}
    (tmp_path / "text").write_text("no certificate")
    for unusable in (tmp_path / "text", tmp_path / "none"):
        with pytest.raises(ConfigError, match=unusable.name):
            tls_options(BusConfig(tls_ca=str(unusable)))
        with pytest.raises(ConfigError, match=unusable.name):
            tls_options(BusConfig(url="tls://x:1", tls_cert=str(unusable)))
