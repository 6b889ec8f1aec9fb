"""The server's certificate for the bus: the operator's, or one made for this machine at every start."""

import datetime
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.stack.config import StackConfig
from shared.errors import ConfigError

_LIFETIME = datetime.timedelta(days=3650)
_CLOCK_SLACK = datetime.timedelta(hours=1)
_NAMES = ("localhost",)
_ADDRESSES = ("127.0.0.1", "::1")


def make_certificate(directory: Path) -> None:
    """A new authority and a server certificate for this machine's loopback names, closed to other users."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = _name("Kvasir local authority")
    ca = (
        _unsigned(authority, authority, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    alternatives = [
        *(x509.DNSName(name) for name in _NAMES),
        *(x509.IPAddress(ipaddress.ip_address(address)) for address in _ADDRESSES),
    ]
    server = (
        _unsigned(_name("Kvasir nats-server"), authority, server_key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(issuer_key, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = server_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    _write(directory / "server.pem", server.public_bytes(pem))
    _write(directory / "server-key.pem", private)
    _write(directory / "ca.pem", ca.public_bytes(pem))


def _unsigned(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SLACK)
        .not_valid_after(now + _LIFETIME)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


@dataclass(frozen=True)
class Certificate:
    """PEM files. Without `ca`, clients trust what their system trusts."""

    cert: Path
    key: Path
    ca: Path | None

    @classmethod
    def from_paths(cls, paths: Mapping[str, str | None]) -> "Certificate":
        ca = paths.get("ca")
        return cls(Path(str(paths["cert"])), Path(str(paths["key"])), Path(ca) if ca else None)

    def paths(self) -> dict[str, str | None]:
        """For state.json; the inverse of `from_paths`."""
        return {"cert": str(self.cert), "key": str(self.key), "ca": str(self.ca) if self.ca else None}


def certificate_for(config: StackConfig, directory: Path) -> Certificate | None:
    """What the settings ask for: none, the operator's files, or new ones in `directory`.

    Raises ConfigError.
    """
    cert, key, ca = config.nats_tls_cert, config.nats_tls_key, config.nats_tls_ca
    if cert is None and key is None:
        if ca is not None:
            raise ConfigError("nats_tls_ca stands alone; name nats_tls_cert and nats_tls_key too")
        return _made(directory) if config.tls else None
    if cert is None or key is None:
        raise ConfigError("nats_tls_cert and nats_tls_key belong together; one of them is missing")
    for path in filter(None, (cert, key, ca)):
        if not os.access(path, os.R_OK):
            raise ConfigError(f"{path}: cannot be read; name a PEM file", param="nats_tls_cert")
    return Certificate(cert.resolve(), key.resolve(), ca.resolve() if ca else None)


def _made(directory: Path) -> Certificate:
    from services.stack.certificates import make_certificate  # costs more than all other imports of `up`

    make_certificate(directory)
    return Certificate(directory / "server.pem", directory / "server-key.pem", directory / "ca.pem")
