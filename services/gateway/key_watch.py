"""The accepted API keys and quotas, from the configuration and from the key file."""

from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from services.gateway.config import GatewayConfig, KeyConfig
from services.gateway.core.quotas import Quota, Quotas
from services.gateway.http.middleware import KeyRing
from shared import key_file, log
from shared.clock import monotonic_s
from shared.errors import ConfigError
from shared.messages.sequence import Tenant

_logger = log.get_logger("gateway.keys")
_Stamp = tuple[int, int, int] | None


class KeyWatch:
    """Keeps a key ring and quotas up to date. An unreadable file changes nothing and is logged once."""

    def __init__(self, config: GatewayConfig) -> None:
        """Raises ConfigError."""
        self._config = config
        self._path = Path(config.keys_file).expanduser() if config.keys_file else None
        self._stamp = self._look()
        tenants, quotas = self._read()
        self.ring = KeyRing(tenants)
        self.quotas = Quotas(quotas)

    def on_over(self, key: str, tokens: int) -> None:
        """Deduct the tokens of a lasting answer that ended from its key's quota."""
        self.quotas.end(key, tokens, monotonic_s())

    def on_tick(self) -> None:
        """Reload the file if it has changed. Call about twice a second."""
        stamp = self._look()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            tenants, quotas = self._read()
        except ConfigError as error:
            _logger.error("the keys stay as they were: %s", error.message)
            return
        self.ring.replace(tenants)
        self.quotas.replace(quotas)
        log.canonical(_logger, "keys read anew", keys=len(tenants))

    def _look(self) -> _Stamp:
        try:
            found = None if self._path is None else self._path.stat()
        except OSError:
            return None
        return None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)

    def _read(self) -> tuple[Mapping[str, Tenant], Mapping[str, Quota]]:
        keys = dict(self._config.keys)
        for name, options in (key_file.read(self._path) if self._path is not None else {}).items():
            if name in keys:
                raise ConfigError(
                    f"the key {name!r} is in {self._path} and in gateway.keys", param="keys_file"
                )
            keys[name] = _checked(name, options, self._path)
        both = self._config.model_copy(update={"keys": keys})
        both.check_keys()
        return both.tenants(), {key.sha256: key.quota() for key in keys.values()}


def _checked(name: str, options: dict[str, object], path: Path | None) -> KeyConfig:
    try:
        return KeyConfig.model_validate(options)
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ConfigError(f"{path}: the key {name!r}: {said}", param="keys_file") from None
