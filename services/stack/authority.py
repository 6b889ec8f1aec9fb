"""Certificate authority for one signature. Its key signs one server certificate and is never stored. A
separate module, because `cryptography` is slow to import and few stacks need it."""

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shared.key_file import write_private

_LIFETIME = datetime.timedelta(days=3650)
_CLOCK_SLACK = datetime.timedelta(hours=1)
LOCAL_NAMES = ("localhost",)
_ADDRESSES = ("127.0.0.1", "::1")
_PURPOSES = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
"""Servers of a cluster are each other's clients."""


def make_certificate(directory: Path, names: Sequence[str] = LOCAL_NAMES) -> None:
    """Create an authority and a server certificate for `names` and loopback, readable only by the owner."""
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
    alternatives = [*(_general_name(name) for name in (*names, *_ADDRESSES))]
    server = (
        _unsigned(_name("Kvasir nats-server"), authority, server_key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(_PURPOSES), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(issuer_key, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = server_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_private(directory / "server.pem", server.public_bytes(pem))
    write_private(directory / "server-key.pem", private)
    write_private(directory / "ca.pem", ca.public_bytes(pem))


def names_host(cert: Path, host: str) -> bool:
    """Return True if the certificate is for this name or address."""
    extensions = x509.load_pem_x509_certificate(cert.read_bytes()).extensions
    return _general_name(host) in extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


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
    others = ("content_commitment", "data_encipherment", "encipher_only", "decipher_only")
    exchange = ("key_encipherment", "key_agreement")
    off = dict.fromkeys((*others, *exchange), False)
    return x509.KeyUsage(digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, **off)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
