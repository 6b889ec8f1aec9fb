"""docker and docker-compose as commands, for one project with a name, an image and secrets of its own.

It judges nothing; what has to hold is in `__main__`.
"""

import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.stack.obstructions import free_port
from tests.stack.running import ROOT

HOST_NETWORK = "deploy/compose.host-network.yml"
IMAGE = "kvasir-compose-test"
MODEL = "harbour"
"""Folder of a copy of Tiny Chat."""
WORKERS = 4
_COMMAND_S = 1800
"""A build downloads packages."""
_POLL_S = 0.5


class CannotRun(Exception):
    """This machine lacks something; the message says what to do."""


def find_compose() -> tuple[str, ...]:
    """The command that runs compose files, with a daemon behind it. Raises CannotRun."""
    if shutil.which("docker") is None:
        raise CannotRun("no `docker` on the path: install Docker (Debian: docker.io and docker-compose)")
    asked = subprocess.run(
        ("docker", "version", "--format", "{{.Server.Version}}"), capture_output=True, text=True, check=False
    )
    if asked.returncode != 0:
        raise CannotRun(
            f"no Docker daemon answers ({asked.stderr.strip()}): start one (`systemctl start docker`, or "
            "`dockerd` as root), or point DOCKER_HOST at one"
        )
    if shutil.which("docker-compose"):
        return ("docker-compose",)
    plugin = subprocess.run(("docker", "compose", "version"), capture_output=True, check=False)
    if plugin.returncode != 0:
        raise CannotRun("neither `docker-compose` nor `docker compose`: install one of them")
    return ("docker", "compose")


@dataclass
class Project:
    """One stack in containers."""

    compose: tuple[str, ...]
    base: str | None
    host_network: bool
    folder: Path
    """For its secrets."""
    models: Path
    """Holds the folder of the model."""
    name: str = field(default_factory=lambda: f"kvasirtest{secrets.token_hex(3)}")
    port: int = field(default_factory=free_port)
    nats_port: int = field(default_factory=free_port)
    operator_port: int = field(default_factory=free_port)
    port_1: int = field(default_factory=free_port)
    operator_port_1: int = field(default_factory=free_port)

    @property
    def gateway(self) -> str:
        return "gateway-host" if self.host_network else "gateway"

    @property
    def gateways(self) -> tuple[str, str]:
        """The containers of both."""
        return (self.gateway, "gateway-1-host" if self.host_network else "gateway-1")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self, *words: str, overrides: tuple[str, ...] = ()) -> None:
        """One compose command, its output on the terminal. Raises CalledProcessError."""
        files = ("docker-compose.yml", *((HOST_NETWORK,) if self.host_network else ()), *overrides)
        named = [word for file in files for word in ("--file", file)]
        argv = [*self.compose, "--project-name", self.name, *named, *words]
        subprocess.run(argv, cwd=ROOT, env=self._environment(), check=True, timeout=_COMMAND_S)

    def up(self) -> None:
        """Start what does not run. Raises CalledProcessError."""
        self.run("up", "--detach", "--scale", f"worker={WORKERS}")

    def container(self, service: str) -> str:
        """Its id, for a worker by the name it took. Raises KeyError, or AssertionError when there is not
        exactly one."""
        if service.startswith("worker-"):
            return self.workers()[service]
        found = self.containers(f"label=com.docker.compose.service={service}")
        assert len(found) == 1, f"{service}: {found}"
        return found[0]

    def workers(self) -> dict[str, str]:
        """Containers of workers by the name they took."""
        return {taken_name(one): one for one in self.containers("label=com.docker.compose.service=worker")}

    def containers(self, *filters: str) -> list[str]:
        """Ids of this project's containers, ended ones too."""
        wanted = (f"label=com.docker.compose.project={self.name}", *filters)
        return docker("ps", "--all", "--quiet", "--no-trunc", *(f"--filter={one}" for one in wanted)).split()

    def health(self, service: str) -> str:
        """`healthy`, `starting`, `unhealthy`, or why it does not run; of all containers of a service."""
        found = self.containers(f"label=com.docker.compose.service={service}")
        states = [state_of(container)["State"] for container in found]
        told = {s["Health"]["Status"] if s["Running"] else s["Status"] for s in states}
        return ", ".join(sorted(told)) or "not there"

    def status(self, service: str, instance: str) -> dict[str, Any]:
        """What an instance says of itself on the bus, asked from inside its container."""
        check = ("python", "-m", "services.stack.healthcheck", instance)
        said: dict[str, Any] = json.loads(docker("exec", self.container(service), *check))
        return said

    def until_healthy(self, *services: str, limit_s: float = 300.0) -> float:
        """Seconds it took. Raises AssertionError with the last state."""
        return until(
            lambda: {s: h for s in services if (h := self.health(s)) != "healthy"}, "unwell", limit_s
        )

    def end(self) -> None:
        """Containers, networks, volumes and the image's name; its layers stay as Docker's build cache."""
        self.run("down", "--volumes", "--remove-orphans", "--timeout", "20")
        subprocess.run(("docker", "image", "rm", IMAGE), capture_output=True, check=False)

    def _environment(self) -> Mapping[str, str]:
        return {
            **os.environ,
            **({"KVASIR_BASE": self.base} if self.base else {}),
            **({} if has_bridge() else {"KVASIR_BUILD_NETWORK": "host"}),
            "KVASIR_IMAGE": IMAGE,
            "KVASIR_SECRETS": str(self.folder),
            "KVASIR_MODELS": str(self.models),
            "KVASIR_MODEL": MODEL,
            "KVASIR_PORT": str(self.port),
            "KVASIR_NATS_PORT": str(self.nats_port),
            "KVASIR_OPERATOR_PORT": str(self.operator_port),
            "KVASIR_PORT_1": str(self.port_1),
            "KVASIR_OPERATOR_PORT_1": str(self.operator_port_1),
            "KVASIR_HEALTH_INTERVAL": "5s",
        }


def has_bridge() -> bool:
    """Whether the daemon has its usual network, in which images are built."""
    return "bridge" in docker("network", "ls", "--format", "{{.Name}}").split()


def state_of(container: str) -> dict[str, Any]:
    """Return Docker's description of the container."""
    details: dict[str, Any] = json.loads(docker("inspect", container))[0]
    return details


def taken_name(container: str) -> str:
    """The name that a worker's container took; empty if it does not run."""
    asked = ("docker", "exec", container, "readlink", "/tmp/kvasir-worker.env")
    told = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False).stdout
    return Path(told.strip()).stem


def docker(*words: str) -> str:
    """What a docker command prints. Raises CalledProcessError."""
    return subprocess.run(("docker", *words), check=True, text=True, capture_output=True, timeout=60).stdout


def until(missing: Callable[[], object], what: str, limit_s: float) -> float:
    """Waits until `missing` returns something empty; the seconds it took. Raises AssertionError."""
    began_s = time.monotonic()
    while left := missing():
        assert time.monotonic() - began_s < limit_s, f"{what} after {limit_s:.0f} s: {left}"
        time.sleep(_POLL_S)
    return time.monotonic() - began_s
