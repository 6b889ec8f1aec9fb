"""Obstacles to a start: another stack, a taken port, or invalid settings. The settings of all services are
checked before the first process starts. Only `services.NAME.config` is imported, by name."""

import contextlib
import errno
import itertools
import os
import secrets
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import cast

import psutil

from services.stack.display import command_line
from services.stack.process import comes_true
from services.stack.rundir import RunDirectory
from services.stack.supervisor import ChildSpec
from shared import subjects
from shared.config import SHARED_SETTINGS, ServiceConfig, check_setting, load
from shared.errors import ConfigError, KvasirError

_FIRST_PORT, _SHARES, _PORTS_OF_SHARE = 12_000, 64, 320
_turns = itertools.count(secrets.randbelow(_PORTS_OF_SHARE))
"""Start position in the port share, random because two processes may have the same share."""


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Return True if the port can be bound now. Raise OSError for a host that is not local."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def free_port(taken: Collection[int] = ()) -> int:
    """Return a free port, not in `taken`, that is unlikely to be given to another process soon. It lies below
    the kernel's ephemeral ports. Each process searches its own share from a random position, so that
    concurrent starts get different ports. Raise OSError if the share is full."""
    share = _FIRST_PORT + os.getpid() % _SHARES * _PORTS_OF_SHARE
    for _ in range(_PORTS_OF_SHARE):
        port = share + next(_turns) % _PORTS_OF_SHARE
        if port not in taken and is_free(port):
            return port
    raise OSError(errno.EADDRINUSE, f"no free port from {share} to {share + _PORTS_OF_SHARE - 1}")


def owner(port: int) -> tuple[int | None, str]:
    """Return the pid of the process that listens on `port`, None if it is another user's, and its name."""
    with contextlib.suppress(psutil.AccessDenied):
        for connection in psutil.net_connections("tcp"):
            if connection.status != psutil.CONN_LISTEN or connection.pid is None:
                continue
            if connection.laddr and connection.laddr.port == port:
                pid, command = _responsible(connection.pid)
                return pid, f"pid {pid} ({command})"
    return None, "a process of another user"


def _responsible(pid: int) -> tuple[int, str]:
    """Return pid and command of the process, or of its stack's supervisor, which would restart it."""
    try:
        process = psutil.Process(pid)
        parent = process.parent()
        words = parent.cmdline() if parent is not None else []
        if parent is not None and "up" in words and any("services" in word for word in words):
            process = parent
        return process.pid, " ".join(process.cmdline())[:120] or "no command line"
    except psutil.Error:
        return pid, "ended meanwhile"


DEFAULT_NATS_PORT = 4222
_claims: dict[int, socket.socket] = {}
_PATIENCE_S = 2.0
"""Time for a stack that was just killed to release its ports."""


class Obstructed(KvasirError):
    """The start is blocked; the message names the obstacle and how to remove it."""

    code = "obstructed"


def running_already(run: RunDirectory) -> Obstructed:
    """Return the error for a second start in one run directory."""
    state, pid = run.read_state(), run.holder()
    where = f" on {state['url']}" if state.get("pid") == pid and "url" in state else ""
    return Obstructed(
        f"a stack runs already from {run.path}: pid {pid}{where}; "
        f"stop it with `{command_line('down', run)}`, or start another one with --run-dir and --port"
    )


def choose_port(port: int, flag: str = "--port", taken: Collection[int] = (), what: str = "HTTP") -> int:
    """Return the port if it is free; 0: any port not in `taken`. Raise Obstructed."""
    if port == 0:
        return free_port(taken=taken)
    if comes_true(lambda: is_free(port), _PATIENCE_S):
        return port
    pid, holder = owner(port)
    how = f"stop it with `kill {pid}`" if pid else "stop it"
    raise Obstructed(
        f"port {port}, wanted for {what}, is taken by {holder}; {how}, or start with another port: "
        f"{flag} N (0: any free one)"
    )


def choose_nats_port(port: int | None, say: Callable[[str], None]) -> int:
    """Return NATS's port: as given (0: any), else the default if free, else any. Raise Obstructed."""
    if port is not None:
        return choose_port(port, "--nats-port", what="NATS")
    if is_free(DEFAULT_NATS_PORT) and _claimed(DEFAULT_NATS_PORT):
        return DEFAULT_NATS_PORT
    chosen = free_port()
    holder = "another stack" if is_free(DEFAULT_NATS_PORT) else owner(DEFAULT_NATS_PORT)[1]
    say(f"port {DEFAULT_NATS_PORT} is taken by {holder}; NATS goes to {chosen}")
    return chosen


def choose_nats_ports(port: int | None, servers: int, say: Callable[[str], None]) -> list[int]:
    """Return the ports of a cluster: the first as above, the next ones, or any. Raise Obstructed."""
    others = [choose_nats_port(port + number if port else 0, say) for number in range(1, servers)]
    return [choose_nats_port(port, say), *others]


def _claimed(port: int) -> bool:
    """Reserve a port among this machine's stacks until this process ends; return False if another stack has
    it. nats-server binds later, so two stacks that start at once would both find the port free."""
    if port in _claims:
        return True
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0kvasir-port-{port}")
    except OSError as error:  # without abstract sockets (they are Linux's), nothing is reserved
        claim.close()
        return error.errno != errno.EADDRINUSE
    _claims[port] = claim
    return True


_PREFIX = "services."


def check_settings(specs: Iterable[ChildSpec], root: Path) -> None:
    """Check the settings of all services. Raise ConfigError listing all faults, one per line. The services
    will run in the folder `root`."""
    problems: dict[str, list[str]] = {}
    with contextlib.chdir(root):
        for spec in specs:
            service = _service_of(spec)
            if service is None:
                continue
            try:
                config = load(config_type_of(service), service, ["--instance", spec.name], spec.env)
                config.check()
                config.check_start()
            except ConfigError as error:
                problems.setdefault(error.message, []).append(spec.name)
    if problems:
        raise ConfigError("\nerror: ".join(f"{_whose(them)}{text}" for text, them in problems.items()))


def check_override(section: str, setting: str) -> None:
    """Check one `--set SECTION.SETTING` of a valid section. Raise ConfigError for an unknown setting."""
    names = setting.split(".") if setting else []
    if section in SHARED_SETTINGS:
        check_setting(ServiceConfig, [section, *names], lambda path: f"--set {'.'.join(path)}")
    else:
        service = section if section in subjects.SERVICES else subjects.service_of(section)
        check_setting(config_type_of(service), names, lambda path: f"--set {'.'.join([section, *path])}")


def gateway_hosts(env: Mapping[str, str]) -> tuple[str, str]:
    """Return the hosts at which clients and the operator reach this gateway locally."""
    try:
        config = load(config_type_of("gateway"), "gateway", [], env)
    except ConfigError:  # reported by `check_settings`
        return "127.0.0.1", "127.0.0.1"
    anywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    hosts = (str(getattr(config, name)) for name in ("host", "operator_host"))
    first, second = (anywhere.get(host, host) for host in hosts)
    return first, second


def config_type_of(service: str) -> type[ServiceConfig]:
    """Return the class of a section's settings."""
    module = import_module(f"{_PREFIX}{service}.config")
    return cast(type[ServiceConfig], getattr(module, f"{service.capitalize()}Config"))


def _service_of(spec: ChildSpec) -> str | None:
    """Return the child's service, or None if it is not one."""
    name = next((word.removeprefix(_PREFIX) for word in spec.argv if word.startswith(_PREFIX)), "")
    return name if name in subjects.SERVICES else None


def _whose(instances: list[str]) -> str:
    """Prefix for an error, empty for a setting that gateway and workers share."""
    services = {instance.rpartition("-")[0] for instance in instances}
    if len(services) > 1:
        return ""
    return f"{instances[0] if len(instances) == 1 else services.pop()}: "
