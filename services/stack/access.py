"""How the users of a stack reach its bus: address, passwords, certificate."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pydantic import SecretStr

from services.stack.certificates import Certificate
from services.stack.rundir import Credentials
from shared.config import ENV_PREFIX, BusConfig


@dataclass(frozen=True)
class BusAccess:
    """The address of one nats-server, and how each user gets in. A user is told its own password only."""

    url: str
    credentials: Credentials
    certificate: Certificate | None = None

    @classmethod
    def to_local(cls, port: int, credentials: Credentials, certificate: Certificate | None) -> "BusAccess":
        """The way to a server on this machine."""
        scheme = "nats" if certificate is None else "tls"
        return cls(f"{scheme}://127.0.0.1:{port}", credentials, certificate)

    @classmethod
    def from_state(cls, state: Mapping[str, Any], credentials: Credentials) -> "BusAccess":
        """What `state` wrote."""
        certificate = state.get("nats_certificate")
        return cls(
            str(state["nats_url"]), credentials, Certificate.from_paths(certificate) if certificate else None
        )

    def state(self) -> dict[str, Any]:
        """Everything but the secrets, for state.json."""
        return {
            "nats_url": self.url,
            "nats_certificate": self.certificate.paths() if self.certificate else None,
        }

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 4222

    def config(self, user: str, **settings: Any) -> BusConfig:
        """For a bus in this process."""
        return BusConfig(
            url=self.url,
            user=user,
            password=SecretStr(self.credentials.nats_passwords[user]),
            tls_ca=self._ca,
            tls_handshake_first=self.certificate is not None,
            **settings,
        )

    def environment(self, user: str) -> dict[str, str]:
        """For a child process."""
        settings = {"URL": self.url, "USER": user, "PASSWORD": self.credentials.nats_passwords[user]}
        if self.certificate is not None:
            settings["TLS_HANDSHAKE_FIRST"] = "true"
        if self._ca is not None:
            settings["TLS_CA"] = self._ca
        return {f"{ENV_PREFIX}BUS__{name}": value for name, value in settings.items()}

    @property
    def _ca(self) -> str | None:
        return str(self.certificate.ca) if self.certificate and self.certificate.ca else None
