"""The certificate holds for this machine's loopback names, under its own authority and no other."""

import ssl
from pathlib import Path

import pytest

from services.stack.authority import make_certificate


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
