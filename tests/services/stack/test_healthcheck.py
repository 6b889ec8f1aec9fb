"""The health check, against nats-server as the containers run it: their configuration, their command line."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from services.predictor.config import PredictorConfig
from services.predictor.service import HANDLERS, Predictor, ServedModels
from services.stack.compose import write_secrets
from services.stack.healthcheck import answer, main
from services.stack.nats_server import binary
from services.stack.obstructions import gateway_hosts, is_free
from services.stack.probes import http_get, listens, serves
from shared.bus import Bus
from shared.config import ServiceConfig, load
from shared.errors import BusUnavailable, ConfigError, NoResponder, PermissionRefused
from tests.tasks import ran

ROOT = Path(__file__).resolve().parents[3]


def environment(folder: Path, instance: str, port: int) -> dict[str, str]:
    lines = [line for file in folder.rglob(f"{instance}.env") for line in file.read_text().splitlines()]
    here = {
        "KVASIR_BUS__URL": f"tls://127.0.0.1:{port}",
        "KVASIR_BUS__TLS_CA": str(folder / "tls" / "ca.pem"),
        "KVASIR_BUS__TLS_HANDSHAKE_FIRST": "true",
    }
    return {**dict(line.split("=", 1) for line in lines), **here}


@pytest.fixture
def secrets(tmp_path: Path, free_port: int) -> Iterator[Path]:
    """A folder of secrets and a server that runs with them, on `free_port`."""
    folder = tmp_path / "secrets"
    write_secrets(folder)
    config = folder / "nats.conf"
    text = config.read_text().replace("/data/nats", str(tmp_path / "store"))
    for mounted, name in (("nats_cert", "server.pem"), ("nats_key", "server-key.pem")):
        text = text.replace(f"/run/secrets/{mounted}", str(folder / "tls" / name))
    config.write_text(text)
    command = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["nats"]["command"]
    here = {"nats-server": binary(), "/run/secrets/nats_conf": str(config), "4222": str(free_port)}
    server = subprocess.Popen([here.get(word, word) for word in command], stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 20
        while is_free(free_port):
            assert server.poll() is None and time.monotonic() < deadline_s, "nats-server did not start"
            time.sleep(0.02)
        yield folder
    finally:
        server.kill()
        server.wait()


async def test_who_answers_is_well(secrets: Path, free_port: int) -> None:
    told = environment(secrets, "predictor-0", free_port)
    assert await answer("nats", environment(secrets, "nats", free_port)) == "greets"
    with pytest.raises(NoResponder):
        await answer("predictor-0", told)
    config = load(ServiceConfig, "predictor", argv=(), environ=told)
    bus = await Bus.connect(config.bus, service="predictor", instance="predictor-0")
    await bus.attach(HANDLERS, Predictor(bus, ServedModels(PredictorConfig(model="constant"))))
    assert json.loads(await answer("predictor-0", told))["model"] == "constant"
    await bus.close()


async def test_a_wrong_password_or_another_instance_is_not_well(secrets: Path, free_port: int) -> None:
    told = environment(secrets, "worker-0", free_port)
    with pytest.raises(BusUnavailable):
        await answer("worker-0", {**told, "KVASIR_BUS__PASSWORD": "guessed"})
    with pytest.raises(PermissionRefused):
        await answer("worker-1", told)


async def test_a_server_that_does_not_greet_is_not_well(free_port: int) -> None:
    told = {"KVASIR_BUS__URL": f"nats://127.0.0.1:{free_port}"}
    with pytest.raises(NoResponder, match="no greeting"):
        await answer("nats", told)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", free_port):
        with pytest.raises(NoResponder, match="is no nats-server"):
            await answer("nats", told)


async def test_the_gateway_is_asked_whether_it_is_ready(free_port: int) -> None:
    reply = b'HTTP/1.1 503 Service Unavailable\r\n\r\n{"error": {"message": "no worker"}}'

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        writer.close()

    told = {"KVASIR_GATEWAY__OPERATOR_PORT": str(free_port)}
    with pytest.raises(NoResponder, match="no answer on port"):
        await answer("gateway-0", told)
    async with await asyncio.start_server(serve, "127.0.0.1", free_port):
        with pytest.raises(NoResponder, match="no worker"):
            await answer("gateway-0", told)
        reply = b"HTTP/1.1 200 OK\r\n\r\n{}"
        assert await answer("gateway-0", told) == "ready"


@pytest.mark.parametrize("name", ["worker", "postgres-0", ""])
async def test_no_such_name(name: str) -> None:
    with pytest.raises(ConfigError):
        await answer(name, {})


def test_exit_codes(free_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway-0"], {"KVASIR_GATEWAY__OPERATOR_PORT": str(free_port)}) == 1
    assert "no answer" in capsys.readouterr().out and main(["janitor-0"], {}) == 2
    assert "janitor-0" in capsys.readouterr().err and main([]) == 2


def test_it_runs_as_the_containers_run_it(secrets: Path, free_port: int) -> None:
    check = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["nats"]["healthcheck"]
    done = ran([sys.executable, *check["test"][2:]], env=environment(secrets, "nats", free_port))
    assert (done.returncode, done.stderr) == (0, "")


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server that reads a request's head and sends `answer`; its port, and what it was asked."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(answer)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], asked


async def test_tcp(free_port: int) -> None:
    assert await listens(free_port) == f"nothing listens on port {free_port} yet"
    async with answering(b"") as (port, _):
        assert await listens(port) is None


@pytest.mark.parametrize(
    ("answer", "obstacle"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", None),
        (b'HTTP/1.1 503 No\r\n\r\n{"error":{"message":"no worker"}}', "no worker"),
        (b"HTTP/1.1 503 No\r\n\r\nwarming\nup", "warming up"),
        (b"HTTP/1.1 404 No\r\n\r\n", "/ready answers 404"),
    ],
)
async def test_http_says_what_is_missing(answer: bytes, obstacle: str | None) -> None:
    async with answering(answer) as (port, _):
        assert await serves(port, "/ready") == obstacle


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-x\r\n", b"HTTP/1.1"])
async def test_what_is_not_http_is_no_answer(answer: bytes, free_port: int) -> None:
    async with answering(answer) as (port, _):
        assert await serves(port, "/ready") == f"no answer on port {port} yet"
    assert await serves(free_port, "/ready") == f"no answer on port {free_port} yet"


async def test_an_address_of_version_6_is_asked_there() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + head)
        writer.close()

    async with await asyncio.start_server(serve, "::1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await serves(port, "/ready", host="::1") is None
        assert f"Host: [::1]:{port}\r\n" in (await http_get(port, "/", host="::1"))[1]


@pytest.mark.parametrize(
    ("host", "reached"), [("::1", "::1"), ("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("10.0.0.7", "10.0.0.7")]
)
def test_a_gateway_is_reached_where_it_listens(host: str, reached: str) -> None:
    environ = {"KVASIR_GATEWAY__HOST": host, "KVASIR_GATEWAY__OPERATOR_HOST": host}
    assert gateway_hosts(environ) == (reached, reached)
