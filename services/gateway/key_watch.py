"""The accepted API keys and their quotas, from the configuration and from the key file."""

from pathlib import Path

from pydantic import ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.config import GatewayConfig, KeyConfig
from services.gateway.core.quotas import UNLIMITED, Quotas
from services.gateway.http.middleware import API_PATHS, RECORD
from shared import key_file, log
from shared.clock import monotonic_s
from shared.errors import ConfigError
from shared.messages.sequence import Tenant

_logger = log.get_logger("gateway.keys")


class KeyWatch:
    """Keeps tenants and quotas up to date. An unreadable file changes nothing and is logged once."""

    def __init__(self, config: GatewayConfig) -> None:
        """Raises ConfigError."""
        self._config = config
        self._path = Path(config.keys_file).expanduser() if config.keys_file else None
        self._stamp = self._look()
        self.tenants: dict[str, Tenant] = {}
        """By key digest; changed in place."""
        self.quotas = Quotas({})
        self.has_quotas = False
        self._read()
        self.may_have_quotas = self.has_quotas or self._path is not None

    def on_over(self, key: str, tokens: int) -> None:
        """Deduct the tokens of a lasting answer that ended from its key's quota."""
        if self.has_quotas:
            self.quotas.end(key, tokens, monotonic_s())

    def on_tick(self) -> None:
        """Reload the file if it has changed. Call about twice a second."""
        stamp = self._look()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._read()
        except ConfigError as error:
            _logger.error("the keys stay as they were: %s", error.message)
        else:
            log.canonical(_logger, "keys read anew", keys=len(self.tenants))

    def _look(self) -> tuple[int, int, int] | None:
        try:
            found = None if self._path is None else self._path.stat()
        except OSError:
            return None
        return None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)

    def _read(self) -> None:
        keys = dict(self._config.keys)
        for name, options in (key_file.read(self._path) if self._path is not None else {}).items():
            if name in keys:
                text = f"the key {name!r} is in {self._path} and in gateway.keys"
                raise ConfigError(text, param="keys_file")
            keys[name] = _checked(name, options, self._path)
        both = self._config.model_copy(update={"keys": keys})
        both.check_keys()
        self.tenants.clear()
        self.tenants.update(both.tenants())
        quotas = {key.sha256: key.quota() for key in keys.values()}
        self.quotas.replace(quotas)
        self.has_quotas = any(quota != UNLIMITED for quota in quotas.values())


def _checked(name: str, options: dict[str, object], path: Path | None) -> KeyConfig:
    try:
        return KeyConfig.model_validate(options)
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ConfigError(f"{path}: the key {name!r}: {said}", param="keys_file") from None


class Metered:
    """ASGI wrapper, inside `Edge`, that counts requests against their keys' quotas."""

    def __init__(self, app: ASGIApp, watched: KeyWatch) -> None:
        self._app = app
        self._watched, self._quotas = watched, watched.quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises RateLimited at the limit."""
        record = scope[RECORD]
        is_counted = scope["method"] == "POST" and scope["path"].startswith(API_PATHS)
        if not (is_counted and self._watched.has_quotas):
            return await self._app(scope, receive, send)
        self._quotas.begin(record.tenant, monotonic_s())
        try:
            await self._app(scope, receive, send)
        finally:
            if not record.is_lasting:
                used = (record.prompt_tokens or 0) + (record.completion_tokens or 0)
                self._quotas.end(record.tenant, used, monotonic_s())
