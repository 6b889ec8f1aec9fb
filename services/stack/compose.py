"""`python -m services.stack.compose [FOLDER [INSTANCE …]] [--hosts A,B,C]`: write the secrets for
docker-compose.yml, or for several hosts.

Writes an environment file with the NATS password of each instance (those of workers in a folder of their
own), nats-server's configuration and certificate, and the API key. Existing secrets are kept, so it can run
again, also to add instances. With hosts, there is a configuration for a nats-server on each, which form one
cluster; their paths are those of this folder. Only the owner can open the folder. Files mounted into
containers are readable by all, because containers run as another user.
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
POOL = "workers"
_GATEWAYS, _WORKERS = 2, 16
"""Names prepared; a worker's container takes a free one (`services.stack.container`)."""
_MOUNTED = Certificate(*(Path("/run/secrets", name) for name in ("nats_cert", "nats_key", "nats_ca")))
"""Paths inside the containers."""
_STORE = Path("/data/nats")
"""Inside the volume of the container nats."""


def main(argv: Sequence[str] | None = None) -> int:
    """Return exit code 0, or 2 if nats-server rejects the configuration."""
    parser = argparse.ArgumentParser(
        prog="python -m services.stack.compose", description="The secrets that docker-compose.yml reads."
    )
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER, help="[deploy/secrets]")
    parser.add_argument("instances", nargs="*", help="beside those of the compose file, such as worker-16")
    parser.add_argument("--hosts", default="", help="addresses of an odd number of hosts, for nats-servers")
    arguments = parser.parse_args(argv)
    try:
        hosts = [host for host in arguments.hosts.split(",") if host]
        write_secrets(arguments.folder, *arguments.instances, hosts=hosts)
    except ConfigError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    print(f"secrets are in {arguments.folder}; the API key is in {arguments.folder / KEY_FILE}")
    return 0


def write_secrets(folder: Path, *more: str, hosts: Sequence[str] = ()) -> None:
    """Write all secrets to `folder`, for compose instances, earlier ones and `more`, with nats-servers on
    `hosts`, if any. Raise ConfigError for an invalid instance name, an even number of hosts or a
    configuration that nats-server rejects."""
    try:
        config = StackConfig(gateways=_GATEWAYS, workers=_WORKERS, nats_cluster=len(hosts) or 1)
        instances = [*config.instances, *(name for name in more if subjects.service_of(name))]
    except ValidationError as error:
        raise ConfigError(error.errors()[0]["msg"].removeprefix("Value error, "), param="hosts") from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    folder = folder.resolve()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    here = _certificate(folder / "tls", hosts or [_HOST])
    places = [f"{host}:{_PORT}" for host in hosts or [_HOST]]
    access = BusAccess.to(places, RunDirectory(folder).credentials(*instances), here)
    if hosts:
        cluster = nats_server.ServerCluster.of([f"{host}:{_ROUTE_PORT}" for host in hosts], access)
        for at in range(len(hosts)):
            path = folder / f"nats-{at}.conf"
            nats_server.write_config(path, config, access, folder / "nats", at, cluster)
    else:
        nats_server.write_config(folder / NATS_CONFIG, config, access, _STORE)
        _write_mounted(folder / NATS_CONFIG, here)
        access = replace(access, certificate=_MOUNTED)
    _write(folder / KEY_FILE, f"{access.credentials.api_key}\n")
    (folder / POOL).mkdir(exist_ok=True)
    (folder / POOL).chmod(0o755)
    for instance in access.credentials.nats_passwords:
        if instance == subjects.OPERATOR:
            continue
        service = subjects.service_of(instance)
        path = folder / (POOL if service == "worker" else "") / f"{instance}.env"
        _write_env(path, access.environment(instance) | _own(service, access))
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


def _write_mounted(path: Path, here: Certificate) -> None:
    """Rewrite the configuration with the container's paths."""
    text = path.read_text()
    for local, mounted in ((here.cert, _MOUNTED.cert), (here.key, _MOUNTED.key)):
        text = text.replace(json.dumps(str(local)), json.dumps(str(mounted)))
    path.write_text(text)
    path.chmod(0o644)


def _own(service: str, access: BusAccess) -> dict[str, str]:
    """Return the gateway's variables: the hash of the API key, which opens /ui as well, not the key."""
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
