"""The server's certificate for the bus: the operator's, or one made for this machine at every start."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.stack.config import StackConfig
from shared.errors import ConfigError


@dataclass(frozen=True)
class Certificate:
    """Where the bus's certificate is, as PEM files. Without `ca`, clients trust what their system trusts."""

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
    from services.stack.authority import make_certificate  # costs more than all other imports of `up`

    make_certificate(directory)
    return Certificate(directory / "server.pem", directory / "server-key.pem", directory / "ca.pem")
