"""`python -m services.stack.healthcheck NAME`: what a container's health check runs inside it.

NAME is `nats` or an instance such as `worker-1`. The gateway is asked for /ready, which covers the stack
behind it; the others for their status, over the bus, as the user who may ask for nothing else. Prints what
was answered and exits 0, or the reason and exits 1. It knows no container, only this process's environment.
"""

import asyncio
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence

from pydantic import SecretStr

from services.stack.config import StackConfig
from services.stack.probes import HttpProbe
from services.stack.roll import RollCall
from shared import subjects
from shared.config import ENV_PREFIX, BusConfig, load
from shared.errors import ConfigError, KvasirError, NoResponder

PASSWORD_VARIABLE = f"{ENV_PREFIX}OPERATOR_PASSWORD"
_PORT_VARIABLE = f"{ENV_PREFIX}GATEWAY__PORT"
_DEFAULT_PORT = "8080"
_CONNECT_S = 3.0
_ANSWER_S = 1.0
"""Every instance of a service is waited for: how many there are is not known here."""


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Exit code 0, 1 (not well), 2 (asked wrongly)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if len(words) != 1:
        print("usage: python -m services.stack.healthcheck nats|INSTANCE", file=sys.stderr)
        return 2
    logging.getLogger("kvasir").addHandler(logging.NullHandler())  # one line is all that is kept
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
    """What `name` says of itself. Raises KvasirError with the reason when it is not well, ConfigError when
    there is no such name or no password."""
    service = name.rpartition("-")[0]
    if service == "gateway":
        return await _gateway(int(environ.get(_PORT_VARIABLE) or _DEFAULT_PORT))
    if name != "nats" and service not in subjects.SERVICES:
        raise ConfigError(f"{name!r} is neither nats nor an instance such as worker-0")
    roll = RollCall(_bus_config(environ))
    try:
        if name == "nats":
            return await _nats(roll)
        return await _instance(roll, service, name)
    finally:
        await roll.close()


async def _gateway(port: int) -> str:
    obstacle = await HttpProbe(port, "/ready").obstacle(0.0)
    if obstacle is not None:
        raise NoResponder(obstacle)
    return "ready"


async def _nats(roll: RollCall) -> str:
    """The server lets this user in and delivers a question, whoever may be there to answer it."""
    heard = await roll.ask("scheduler", deadline_s=_ANSWER_S, expected=1)
    return f"delivers; {len(heard)} scheduler heard"


async def _instance(roll: RollCall, service: str, instance: str) -> str:
    for status in await roll.ask(service, deadline_s=_ANSWER_S):
        if status.instance == instance:
            return json.dumps(status.details)
    raise NoResponder(f"{instance} does not answer on the bus")


def _bus_config(environ: Mapping[str, str]) -> BusConfig:
    """As the service in this container reaches NATS, but as the operator."""
    password = environ.get(PASSWORD_VARIABLE)
    if not password:
        raise ConfigError(f"{PASSWORD_VARIABLE} is not set; `make secrets` writes it")
    bus = load(StackConfig, "stack", argv=(), environ=environ).bus
    operator = {"user": subjects.OPERATOR, "password": SecretStr(password), "connect_timeout_s": _CONNECT_S}
    return bus.model_copy(update=operator)


if __name__ == "__main__":
    raise SystemExit(main())
