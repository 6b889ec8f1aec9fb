"""Certificates of the bus, passwords of further instances, keys of clients: made, let in, refused."""

import asyncio
import io
import json
import ssl
import stat
from pathlib import Path

import pytest
from pydantic import SecretStr
from rich.console import Console

from services.stack import cli
from services.stack.access import BusAccess, Certificate, certificate_for
from services.stack.authority import make_certificate
from services.stack.config import StackConfig
from services.stack.nats_server import credentials
from services.stack.rundir import Credentials, RunDirectory
from shared import key_file
from shared.bus import Bus
from shared.config import BusConfig, ServiceConfig, load
from shared.config.loading import load as load_config
from shared.config.models import ServiceConfig as AnyConfig
from shared.errors import BusUnavailable, ConfigError
from tests.patience import until
from tests.services.stack.secured import secured_server


def told(run: RunDirectory, name: str) -> BusConfig:
    """What the printed lines say to the process that is started with them."""
    console = Console(file=io.StringIO(), soft_wrap=True)
    assert credentials(run, console, name) == 0 and isinstance(console.file, io.StringIO)
    printed = dict(line.split("=", 1) for line in console.file.getvalue().splitlines())
    return load(ServiceConfig, "worker", argv=(), environ=printed).bus


async def test_another_worker_is_let_in_and_nobody_is_thrown_out(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    async with secured_server(tmp_path) as access:
        assert run.acquire()
        there = await Bus.connect(access.config("worker-0"), service="worker", instance="worker-0")
        guessed = BusConfig(url=access.url, user="worker-7", password=SecretStr("no"), connect_timeout_s=0.4)
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
        credentials(run, Console(file=io.StringIO()), "janitor-0")
    with pytest.raises(ConfigError, match="nothing runs"):
        credentials(run, Console(file=io.StringIO()), "worker-7")


def test_none_made_or_the_operators(tmp_path: Path) -> None:
    assert certificate_for(StackConfig(), tmp_path / "tls") is None and not (tmp_path / "tls").exists()
    made = certificate_for(StackConfig(tls=True), tmp_path / "tls")
    assert made is not None and made.ca is not None and made == Certificate.from_paths(made.paths())
    own = StackConfig(tls=True, nats_tls_cert=made.cert, nats_tls_key=made.key, nats_tls_ca=made.ca)
    assert certificate_for(own, tmp_path / "unused") == made and not (tmp_path / "unused").exists()
    public = StackConfig(nats_tls_cert=made.cert, nats_tls_key=made.key)
    assert certificate_for(public, tmp_path) == Certificate(made.cert, made.key, None)


def test_every_start_has_a_new_one_that_others_cannot_read(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    make_certificate(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    make_certificate(folder)
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert before.keys() == after.keys() == {"ca.pem", "server.pem", "server-key.pem"}
    assert all(before[name] != after[name] for name in before)
    for path in (folder, *folder.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


def test_half_of_it_is_refused(tmp_path: Path) -> None:
    make_certificate(tmp_path)
    cert, key, ca = (tmp_path / name for name in ("server.pem", "server-key.pem", "ca.pem"))
    for wrong in (
        StackConfig(nats_tls_cert=cert),
        StackConfig(nats_tls_key=key),
        StackConfig(nats_tls_ca=ca),
        StackConfig(nats_tls_cert=cert, nats_tls_key=tmp_path / "none.pem"),
    ):
        with pytest.raises(ConfigError, match=r"nats_tls|none\.pem"):
            certificate_for(wrong, tmp_path)


def handshake(server_files: Path, ca: Path, hostname: str) -> None:
    """A whole TLS handshake in memory. Raises ssl.SSLError when the client does not trust the server."""
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(server_files / "server.pem", server_files / "server-key.pem")
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_context = ssl.create_default_context(cafile=str(ca))
    client_context.verify_flags |= ssl.VERIFY_X509_STRICT
    sides = [
        client_context.wrap_bio(to_client, to_server, server_hostname=hostname),
        server_context.wrap_bio(to_server, to_client, server_side=True),
    ]
    while sides:
        for side in list(sides):
            try:
                side.do_handshake()
                sides.remove(side)
            except ssl.SSLWantReadError:
                pass


@pytest.mark.parametrize("hostname", ["localhost", "127.0.0.1", "::1"])
def test_loopback_is_trusted(tmp_path: Path, hostname: str) -> None:
    make_certificate(tmp_path)
    handshake(tmp_path, tmp_path / "ca.pem", hostname)


def test_other_names_and_other_authorities_are_not(tmp_path: Path) -> None:
    make_certificate(tmp_path / "one")
    make_certificate(tmp_path / "two")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path / "one", tmp_path / "one" / "ca.pem", "example.org")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path / "one", tmp_path / "two" / "ca.pem", "localhost")


CERTIFICATE = Certificate(Path("/c/server.pem"), Path("/c/key.pem"), Path("/c/ca.pem"))


def credentials_of(path: Path) -> Credentials:
    run = RunDirectory(path)
    run.create()
    return run.credentials("worker-0", "worker-1", "gateway-0")


@pytest.mark.parametrize("certificate", [None, CERTIFICATE, Certificate(Path("/c"), Path("/k"), None)])
def test_children_and_state_lead_to_the_same_server(tmp_path: Path, certificate: Certificate | None) -> None:
    access = BusAccess.to([7422], credentials_of(tmp_path), certificate)
    assert access.ports[0] == 7422 and access.url.startswith("tls://") == (certificate is not None)
    state = json.dumps(access.state())
    assert not any(password in state for password in access.credentials.nats_passwords.values())
    assert BusAccess.from_state(json.loads(state), access.credentials) == access
    child = load_config(AnyConfig, "worker", argv=[], environ=access.environment("worker-0"))
    assert child.bus == access.config("worker-0")


def test_everybody_gets_the_own_password_only(tmp_path: Path) -> None:
    access = BusAccess.to([7422], credentials_of(tmp_path), None)
    for user, password in access.credentials.nats_passwords.items():
        environment = " ".join(access.environment(user).values())
        assert [o for o in access.credentials.nats_passwords.values() if o in environment] == [password]
        config = access.config(user, connect_timeout_s=3.0)
        assert isinstance(config, BusConfig) and config.connect_timeout_s == 3.0
        assert password not in repr(config)


def keys(capsys: pytest.CaptureFixture[str], run: Path, *words: str) -> tuple[int, str]:
    code = cli.main(["keys", "--run-dir", str(run), *words])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_added_listed_and_revoked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, key = keys(capsys, tmp_path, "add", "team-a", "--class", "guaranteed", "--max-concurrent", "3")
    key = key.strip()
    assert code == 0 and key.startswith("sk-") and len(key) == 51
    file = tmp_path / "keys.json"
    assert file.stat().st_mode & 0o777 == 0o600 and key not in file.read_text()
    assert json.loads(file.read_text())["keys"]["team-a"] == {
        "sha256": key_file.digest_of(key),
        "class": "guaranteed",
        "max_concurrent": 3,
    }
    code, said = keys(capsys, tmp_path, "list")
    assert code == 0 and "team-a" in said and "max_concurrent 3" in said and key not in said
    code, said = keys(capsys, tmp_path, "add", "team-a")
    assert code == 2 and "revoke it first" in said and keys(capsys, tmp_path, "revoke", "team-a")[0] == 0
    code, said = keys(capsys, tmp_path, "revoke", "team-a")
    assert code == 2 and "there is no key 'team-a'" in said
    assert keys(capsys, tmp_path, "add", "no name")[0] == 2


def test_a_plain_key_is_read_and_can_be_hashed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plain.json"
    file.write_text(json.dumps({"keys": {"old": {"key": "sk-plain", "weight": 2}}}))
    expected = {"old": {"sha256": key_file.digest_of("sk-plain"), "weight": 2}}
    assert key_file.read(file) == expected
    code, said = keys(capsys, tmp_path, "--file", str(file), "hash")
    assert code == 0 and "hashed: old" in said and "sk-plain" not in file.read_text()
    assert key_file.read(file) == expected and key_file.hash_plain(file) == []


@pytest.mark.parametrize("content", ["", "[]", '{"keys": []}', '{"keys": {"a": 1}}', "\x00"])
def test_what_is_no_file_of_keys_is_said(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match="file of keys"):
        key_file.read(file)
    assert key_file.read(tmp_path / "none.json") == {}
