"""`python -m services.stack.compose [FOLDER [INSTANCE …]] [--nats-cluster N | --hosts A,B,C]`: write the
secrets for docker-compose.yml, for the pods of deploy/chart, or for several hosts.

Writes an environment file with the NATS password of each instance (those of workers in a folder of their
own), nats-server's configuration and certificate, and the API key. Existing secrets are kept, so it can run
again, also to add instances. In a cluster, each nats-server has a configuration: with hosts, its paths are
those of this folder, else those of containers. Only the owner can open the folder. Files
mounted into containers are readable by all, because containers run as another user.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from services.stack import nats_server
from services.stack.access import BusAccess, Certificate
from services.stack.config import StackConfig
from services.stack.rundir import ROOT, RunDirectory
from shared import subjects
from shared.config import ENV_PREFIX
from shared.errors import ConfigError

DEFAULT_FOLDER = ROOT / "deploy" / "secrets"
NATS_CONFIG, KEY_FILE = "nats.conf", "api_key"
_HOST = "nats"
"""Service name in docker-compose.yml."""
_PORT, _ROUTE_PORT = 4222, 6222
_MONITOR = "127.0.0.1:8222"
"""Where a server of a cluster in containers says whether its replicas are current."""
POOL = "workers"
_GATEWAYS, _SCHEDULERS, _WORKERS = 2, 2, 16
"""Names prepared; a worker's container takes a free one (`services.stack.container`)."""
_STANDBYS = ("placement-1", "ledger-1")
_MOUNTED = Certificate(*(Path("/run/secrets", name) for name in ("nats_cert", "nats_key", "nats_ca")))
"""Paths inside the containers."""
_STORE = Path("/data/nats")
"""Inside the volume of the container nats."""
_ACROSS_HOSTS = {"WORKER_TIMEOUT_S": "1.2", "LEASE_TTL_S": "0.8"}


def main(argv: Sequence[str] | None = None) -> int:
    """Return exit code 0, or 2 if nats-server rejects the configuration."""
    parser = argparse.ArgumentParser(
        prog="python -m services.stack.compose", description="The secrets that docker-compose.yml reads."
    )
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER, help="[deploy/secrets]")
    parser.add_argument("instances", nargs="*", help="beside those of the compose file, such as worker-16")
    servers = parser.add_mutually_exclusive_group()
    servers.add_argument("--hosts", default="", help="addresses of an odd number of hosts, for nats-servers")
    servers.add_argument(
        "--nats-cluster", type=int, default=0, help="nats-servers in containers [as before, or 1]"
    )
    arguments = parser.parse_args(argv)
    try:
        hosts = [host for host in arguments.hosts.split(",") if host]
        write_secrets(
            arguments.folder, *arguments.instances, hosts=hosts, nats_cluster=arguments.nats_cluster
        )
    except ConfigError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    print(f"secrets are in {arguments.folder}; the API key is in {arguments.folder / KEY_FILE}")
    return 0


def write_secrets(folder: Path, *more: str, hosts: Sequence[str] = (), nats_cluster: int = 0) -> None:
    """Write all secrets to `folder`, for compose instances, earlier ones and `more`, with nats-servers on
    `hosts`, if any, else with `nats_cluster` in containers (0: as many as before). Raise ConfigError for an
    invalid instance name, an even number of servers or a configuration that nats-server rejects."""
    nats_cluster = nats_cluster or len([*folder.glob("nats-*.conf")]) or 1
    try:
        config = StackConfig(
            gateways=_GATEWAYS,
            schedulers=_SCHEDULERS,
            workers=_WORKERS,
            nats_cluster=len(hosts) or nats_cluster,
        )
        names = [name for name in (*_STANDBYS, *more) if subjects.service_of(name)]
    except ValidationError as error:
        raise ConfigError(error.errors()[0]["msg"].removeprefix("Value error, "), param="hosts") from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    folder = folder.resolve()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    pods = [f"nats-{at}.{_HOST}" for at in range(nats_cluster)] if nats_cluster > 1 else [_HOST]
    servers = hosts or pods
    here = _certificate(folder / "tls", servers)
    credentials = RunDirectory(folder).credentials(*config.instances, *names)
    access = BusAccess.to([f"{host}:{_PORT}" for host in servers], credentials, here)
    routes = [f"{host}:{_ROUTE_PORT}" for host in servers]
    cluster = nats_server.ServerCluster.of(routes, access)
    for at, route in enumerate(routes):
        path = folder / (f"nats-{at}.conf" if hosts or cluster else NATS_CONFIG)
        nats_server.write_config(path, config, access, folder / "nats" if hosts else _STORE, at, cluster)
        if not hosts:
            _write_mounted(path, here, route)
    if not hosts:
        access = replace(access, certificate=_MOUNTED)
    _write(folder / KEY_FILE, f"{access.credentials.api_key}\n")
    (folder / POOL).mkdir(exist_ok=True)
    (folder / POOL).chmod(0o755)
    for instance in access.credentials.nats_passwords:
        if instance == subjects.OPERATOR:
            continue
        service = subjects.service_of(instance)
        path = folder / (POOL if service == "worker" else "") / f"{instance}.env"
        _write_env(path, access.environment(instance) | _own(service, access, across_hosts=bool(hosts)))
        if service == "worker":
            path.chmod(0o644)


def _certificate(folder: Path, hosts: Sequence[str]) -> Certificate:
    """Return the certificate, created once because running containers trust its authority. Raise ConfigError
    if it lacks a host."""
    from services.stack.authority import LOCAL_NAMES, make_certificate, names_host

    made = Certificate(folder / "server.pem", folder / "server-key.pem", folder / "ca.pem")
    if not all(path.exists() for path in (made.cert, made.key, folder / "ca.pem")):
        make_certificate(folder, (*LOCAL_NAMES, *hosts))
    if lacking := [host for host in hosts if not names_host(made.cert, host)]:
        raise ConfigError(
            f"the certificate in {folder} does not name {', '.join(lacking)}: move that folder away, run "
            "this again, and give every host the new files"
        )
    for path in folder.iterdir():
        path.chmod(0o644)
    return made


def _write_mounted(path: Path, here: Certificate, route: str) -> None:
    """Rewrite the configuration with the container's paths; its name may resolve only once it runs."""
    text = path.read_text()
    for local, mounted in zip(here.paths().values(), _MOUNTED.paths().values(), strict=True):
        text = text.replace(json.dumps(local), json.dumps(mounted))
    listens = f'  listen: "{route}"\n'
    if listens in text:
        text = text.replace(listens, f'  listen: "0.0.0.0:{_ROUTE_PORT}"\n  advertise: "{route}"\n')
        text += f'http: "{_MONITOR}"\n'
    path.write_text(text)
    path.chmod(0o644)


def _own(service: str, access: BusAccess, *, across_hosts: bool) -> dict[str, str]:
    """Return what a service gets besides: a gateway the hash of the API key, which opens /ui as well, not the
    key; a scheduler across hosts times that keep pauses below 2 s, since a lost host announces nothing."""
    if service == "scheduler" and across_hosts:
        return {f"{ENV_PREFIX}SCHEDULER__{name}": value for name, value in _ACROSS_HOSTS.items()}
    if service != "gateway":
        return {}
    hashes = json.dumps([access.credentials.api_key_sha256])
    return {f"{ENV_PREFIX}GATEWAY__{of}_KEY_SHA256": hashes for of in ("API", "ADMIN")}


def _write_env(path: Path, variables: dict[str, str]) -> None:
    _write(path, "".join(f"{name}={value}\n" for name, value in variables.items()))


def _write(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(text)


if __name__ == "__main__":
    raise SystemExit(main())
