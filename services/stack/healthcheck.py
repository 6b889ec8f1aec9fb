"""`python -m services.stack.healthcheck NAME`: health check that runs inside a container.

NAME is `nats`, an instance such as `gateway-1`, or `worker` for the name that this container took. For the
gateway it queries /ready on the operator port, for nats-server the greeting, which needs no password. For
other services it requests their status over the bus, as their own NATS user. It prints the reply and exits 0,
or the reason and exits 1.
"""

import asyncio
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence

from services.stack.config import StackConfig
from services.stack.probes import greeting, serves
from shared import subjects
from shared.config import ENV_PREFIX, BusConfig, load
from shared.errors import ConfigError, KvasirError, NoResponder
from shared.messages.base import Empty
from shared.messages.reports import ServiceStatus

_PORT_VARIABLE = f"{ENV_PREFIX}GATEWAY__OPERATOR_PORT"
_DEFAULT_PORT = "8081"
_CONNECT_S = 3.0
_ANSWER_S = 2.0


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Return exit code 0, 1 (unhealthy) or 2 (usage error)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if len(words) != 1:
        print("usage: python -m services.stack.healthcheck nats|worker|INSTANCE", file=sys.stderr)
        return 2
    logging.getLogger("kvasir").addHandler(logging.NullHandler())  # only the printed line is kept
    try:
        print(asyncio.run(answer(words[0], os.environ if environ is None else environ)))
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return 2
    except KvasirError as error:
        print(error.message)
        return 1
    return 0


async def answer(name: str, environ: Mapping[str, str]) -> str:
    """Return the status of `name`. Raise KvasirError with the reason if it is unhealthy, ConfigError for an
    unknown name."""
    if name == "nats":
        return await _nats(_bus_config(environ))
    if name == "worker":
        from services.stack.container import with_own_name

        environ = with_own_name(environ)
        name = environ[f"{ENV_PREFIX}BUS__USER"]
    try:
        service = subjects.service_of(name)
    except ValueError as error:
        raise ConfigError(f"neither nats nor an instance: {error}") from None
    if service == "gateway":
        obstacle = await serves(int(environ.get(_PORT_VARIABLE) or _DEFAULT_PORT), "/ready")
        if obstacle is not None:
            raise NoResponder(obstacle)
        return "ready"
    return await _instance(_bus_config(environ), service, name)


async def _nats(config: BusConfig) -> str:
    """Check the greeting of nats-server."""
    try:
        async with asyncio.timeout(_CONNECT_S):
            await greeting(config)
    except ValueError as error:
        raise NoResponder(str(error)) from None
    except (OSError, TimeoutError) as error:
        raise NoResponder(f"no greeting from {config.url}: {error or 'too late'}") from None
    return "greets"


async def _instance(config: BusConfig, service: str, instance: str) -> str:
    from shared.bus import Bus  # imported late, because the other checks do not need it

    bus = await Bus.connect(config, service=service, instance=instance)
    try:
        subject = subjects.instance_status(service, instance)
        status = await bus.request(subject, Empty(), ServiceStatus, deadline_s=_ANSWER_S)
    except NoResponder:
        raise NoResponder(f"{instance} does not answer on the bus") from None
    finally:
        await bus.close()
    if loading := status.details.get("loading"):
        raise NoResponder(f"{instance} loads its model: {loading}")
    return json.dumps(status.details)


def _bus_config(environ: Mapping[str, str]) -> BusConfig:
    """Return the bus settings of the container's service."""
    bus = load(StackConfig, "stack", argv=(), environ=environ).bus
    return bus.model_copy(update={"connect_timeout_s": _CONNECT_S})


if __name__ == "__main__":
    raise SystemExit(main())
