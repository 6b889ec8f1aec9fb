"""What can be in the way of a start, and how to say it: another stack in this run directory, a taken port."""

import time
from collections.abc import Callable

from services.stack import ports
from services.stack.display import command_line
from services.stack.rundir import RunDirectory
from shared.errors import KvasirError

DEFAULT_NATS_PORT = 4222
_PATIENCE_S = 2.0
"""A stack that was killed a moment ago may not have left its ports yet."""


class Obstructed(KvasirError):
    """Something is in the way; the message says what, and how to get it out."""

    code = "obstructed"


def running_already(run: RunDirectory) -> Obstructed:
    """The error for a second start in one run directory."""
    state, pid = run.read_state(), run.holder()
    where = f" on {state['url']}" if state.get("pid") == pid and "url" in state else ""
    return Obstructed(
        f"a stack runs already from {run.path}: pid {pid}{where}; "
        f"stop it with `{command_line('down', run)}`, or start another one with --run-dir and --port"
    )


def choose_port(port: int, flag: str = "--port") -> int:
    """A port of the gateway's, free; 0 takes any. Raises Obstructed."""
    if port == 0:
        return ports.free_port()
    if not _free_soon(port):
        raise _taken(port, "HTTP", flag)
    return port


def choose_nats_port(port: int | None, say: Callable[[str], None]) -> int:
    """The port for NATS: as asked (0 takes any), or the usual one if it is free and any otherwise. Raises
    Obstructed."""
    if port is None:
        if ports.is_free(DEFAULT_NATS_PORT):
            return DEFAULT_NATS_PORT
        chosen = ports.free_port()
        say(f"port {DEFAULT_NATS_PORT} is taken by {ports.owner(DEFAULT_NATS_PORT)}; NATS goes to {chosen}")
        return chosen
    if port == 0:
        return ports.free_port()
    if not _free_soon(port):
        raise _taken(port, "NATS", "--nats-port")
    return port


def _free_soon(port: int) -> bool:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not (free := ports.is_free(port)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return free


def _taken(port: int, what: str, flag: str) -> Obstructed:
    holder = ports.owner(port)
    how = f"stop it with `kill {holder.pid}`" if holder.pid else "stop it"
    return Obstructed(
        f"port {port}, wanted for {what}, is taken by {holder}; {how}, or start with another port: "
        f"{flag} N (0: any free one)"
    )
