"""`credentials NAME`: how an instance that the supervisor does not run gets onto the bus of a running stack.

Every instance is a NATS user of its own. What `up` starts has been let in by then; for another worker, a
standby or a service of one's own under a name of its own, the user is made here and nats-server is told,
without disturbing anybody who is connected.
"""

import asyncio
import os
import signal

from rich.console import Console

from services.stack import nats_server
from services.stack.access import BusAccess
from services.stack.display import command_line, say
from services.stack.rundir import RunDirectory
from shared import subjects
from shared.errors import BusUnavailable, ConfigError, InternalError

_ACCEPTED_S = 10.0


def credentials(run: RunDirectory, name: str, console: Console) -> int:
    """Prints the variables with which instance `name`, or the operator, reaches the bus. Returns 0.

    Raises ConfigError for a name that is neither or where nothing runs, InternalError when nats-server did
    not take the user."""
    try:
        subjects.permissions_of(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    state = run.read_state()
    if run.holder() is None or "nats_url" not in state:
        raise ConfigError(f"nothing runs from {run.path}; `{command_line('up', run)}` starts it")
    is_known = name in run.credentials().nats_passwords
    access = BusAccess.from_state(state, run.credentials(name))
    if not is_known:
        nats_server.replace_users(run.nats_config, access)
        (pid,) = (child["pid"] for child in state["children"] if child["name"] == "nats")
        os.kill(pid, signal.SIGHUP)
        asyncio.run(_until_accepted(access, name))
    for variable, value in access.environment(name).items():
        say(console, f"{variable}={value}")
    return 0


async def _until_accepted(access: BusAccess, name: str) -> None:
    from shared.bus import Bus

    try:
        config = access.config(name, connect_timeout_s=_ACCEPTED_S)
        bus = await Bus.connect(config, service=name.partition("-")[0], instance=name)
    except BusUnavailable as error:
        raise InternalError(f"nats-server did not take the user {name}: {error.message}") from None
    await bus.close()
