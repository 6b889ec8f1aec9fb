"""Access of a stack's users to its bus: addresses, passwords, certificate."""

import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import SecretStr

from services.stack.config import StackConfig
from services.stack.rundir import Credentials
from shared.config import ENV_PREFIX, BusConfig
from shared.errors import ConfigError


@dataclass(frozen=True)
class Certificate:
    """PEM files of the bus's certificate. Without `ca`, clients trust the system's authorities."""

    cert: Path
    key: Path
    ca: Path | None

    @classmethod
    def from_paths(cls, paths: Mapping[str, str | None]) -> "Certificate":
        ca = paths.get("ca")
        return cls(Path(str(paths["cert"])), Path(str(paths["key"])), Path(ca) if ca else None)

    def paths(self) -> dict[str, str | None]:
        """Return the paths for state.json; inverse of `from_paths`."""
        return {"cert": str(self.cert), "key": str(self.key), "ca": str(self.ca) if self.ca else None}


def certificate_for(config: StackConfig, directory: Path) -> Certificate | None:
    """Return the configured certificate: none, the operator's files, or a new one in `directory`. Raise
    ConfigError."""
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
    from services.stack.authority import make_certificate  # slower than all other imports of `up`

    make_certificate(directory)
    return Certificate(directory / "server.pem", directory / "server-key.pem", directory / "ca.pem")


@dataclass(frozen=True)
class BusAccess:
    """Addresses of the nats-servers and their users' credentials. A user receives only its own password."""

    url: str
    """Of all servers, with commas."""
    credentials: Credentials
    certificate: Certificate | None = None

    @classmethod
    def to(
        cls, places: Iterable[str | int], credentials: Credentials, certificate: Certificate | None
    ) -> "BusAccess":
        """Return access to servers at these HOST:PORT, or ports of this machine."""
        scheme = "nats" if certificate is None else "tls"
        hosts = (f"127.0.0.1:{place}" if isinstance(place, int) else place for place in places)
        return cls(",".join(f"{scheme}://{host}" for host in hosts), credentials, certificate)

    @classmethod
    def from_state(cls, state: Mapping[str, Any], credentials: Credentials) -> "BusAccess":
        """Restore what `state` returned."""
        certificate = state.get("nats_certificate")
        return cls(
            str(state["nats_url"]), credentials, Certificate.from_paths(certificate) if certificate else None
        )

    def state(self) -> dict[str, Any]:
        """Return everything but the secrets, for state.json."""
        return {
            "nats_url": self.url,
            "nats_certificate": self.certificate.paths() if self.certificate else None,
        }

    @property
    def places(self) -> list[str]:
        """HOST:PORT of each server."""
        return [urlsplit(url).netloc for url in self.url.split(",")]

    @property
    def ports(self) -> list[int]:
        """Port of each server."""
        return [urlsplit(url).port or 4222 for url in self.url.split(",")]

    def each(self) -> "list[BusAccess]":
        """Return access to each server alone."""
        return [replace(self, url=url) for url in self.url.split(",")]

    def url_of(self, user: str) -> str:
        """Return the addresses in the user's own order, so that the servers share the connections."""
        urls = self.url.split(",")
        first = zlib.crc32(user.encode()) % len(urls)
        return ",".join([*urls[first:], *urls[:first]])

    def config(self, user: str, **settings: Any) -> BusConfig:
        """Return the bus settings for this process."""
        return BusConfig(
            url=self.url_of(user),
            user=user,
            password=SecretStr(self.credentials.nats_passwords[user]),
            tls_ca=self._ca,
            tls_handshake_first=self.certificate is not None,
            **settings,
        )

    def environment(self, user: str) -> dict[str, str]:
        """Return the bus settings for a child process."""
        settings = {"URL": self.url_of(user), "USER": user, "PASSWORD": self.credentials.nats_passwords[user]}
        if self.certificate is not None:
            settings["TLS_HANDSHAKE_FIRST"] = "true"
        if self._ca is not None:
            settings["TLS_CA"] = self._ca
        return {f"{ENV_PREFIX}BUS__{name}": value for name, value in settings.items()}

    @property
    def _ca(self) -> str | None:
        return str(self.certificate.ca) if self.certificate and self.certificate.ca else None
