"""Which certificate the settings ask for.

The certificate holds for this machine's loopback names, under its own authority and no other.

Each user's way in, for processes and through state.json.
"""

import json
import ssl
import stat
from pathlib import Path

import pytest

from services.stack.access import BusAccess, Certificate, certificate_for
from services.stack.authority import make_certificate
from services.stack.config import StackConfig
from services.stack.rundir import Credentials, RunDirectory
from shared.config import BusConfig
from shared.config.loading import load
from shared.config.models import ServiceConfig
from shared.errors import ConfigError


def test_none_made_or_the_operators(tmp_path: Path) -> None:
    assert certificate_for(StackConfig(), tmp_path / "tls") is None
    assert not (tmp_path / "tls").exists()
    made = certificate_for(StackConfig(tls=True), tmp_path / "tls")
    assert made is not None
    assert made.ca is not None
    assert made == Certificate.from_paths(made.paths())
    own = StackConfig(tls=True, nats_tls_cert=made.cert, nats_tls_key=made.key, nats_tls_ca=made.ca)
    assert certificate_for(own, tmp_path / "unused") == made
    assert not (tmp_path / "unused").exists()
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


def credentials(path: Path) -> Credentials:
    run = RunDirectory(path)
    run.create()
    return run.credentials("worker-0", "worker-1", "gateway-0")


@pytest.mark.parametrize("certificate", [None, CERTIFICATE, Certificate(Path("/c"), Path("/k"), None)])
def test_children_and_state_lead_to_the_same_server(tmp_path: Path, certificate: Certificate | None) -> None:
    access = BusAccess.to_local(7422, credentials(tmp_path), certificate)
    assert access.port == 7422
    assert access.url.startswith("tls://") == (certificate is not None)
    state = json.dumps(access.state())
    assert not any(password in state for password in access.credentials.nats_passwords.values())
    assert BusAccess.from_state(json.loads(state), access.credentials) == access
    child = load(ServiceConfig, "worker", argv=[], environ=access.environment("worker-0"))
    assert child.bus == access.config("worker-0")


def test_everybody_gets_the_own_password_only(tmp_path: Path) -> None:
    access = BusAccess.to_local(7422, credentials(tmp_path), None)
    for user, password in access.credentials.nats_passwords.items():
        environment = " ".join(access.environment(user).values())
        assert [other for other in access.credentials.nats_passwords.values() if other in environment] == [
            password
        ]
        config = access.config(user, connect_timeout_s=3.0)
        assert isinstance(config, BusConfig)
        assert config.connect_timeout_s == 3.0
        assert password not in repr(config)
