"""TLS on the way to nats-server, from the settings of the bus."""

import ssl
from typing import Any

import nats.errors
from nats.aio.client import Client

from shared.config import BusConfig
from shared.errors import ConfigError


class EncryptedClient(Client):
    """A client that sends its password to nobody who would take it in the clear, as nats-py does."""

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and not info.get("tls_required"):
            raise nats.errors.Error("nats: the server offers no TLS")
        await super()._process_info(info, initial_connection)


def tls_options(config: BusConfig) -> dict[str, Any]:
    """For nats-py; empty without TLS. Raises ConfigError naming the file that cannot be used."""
    if not config.url.startswith(("tls://", "wss://")) and config.tls_ca is None:
        return {}
    try:
        context = ssl.create_default_context(cafile=config.tls_ca)
    except OSError as error:
        raise ConfigError(
            f"{config.tls_ca} is no PEM file of an authority: {error}", param="tls_ca"
        ) from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if config.tls_cert is not None:
        try:
            context.load_cert_chain(config.tls_cert, config.tls_key)
        except OSError as error:
            raise ConfigError(
                f"{config.tls_cert} with {config.tls_key or 'no key'} is no certificate: {error}",
                param="tls_cert",
            ) from None
    return {"tls": context, "tls_handshake_first": config.tls_handshake_first}
