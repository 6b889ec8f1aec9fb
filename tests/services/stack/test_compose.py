"""The secrets for docker-compose.yml, and that the compose files use what is written and nothing else."""

import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.stack.compose import main, write_secrets
from services.stack.healthcheck import PASSWORD_VARIABLE
from shared import subjects

ROOT = Path(__file__).resolve().parents[3]
STACK = {"nats", "scheduler", "predictor", "placement", "ledger", "worker-0", "worker-1", "gateway"}


def variables(path: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in path.read_text().splitlines())


def services_of(file: str) -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / file).read_text())["services"]
    return services


def test_a_service_is_told_its_own_password_and_the_operators(tmp_path: Path) -> None:
    write_secrets(tmp_path / "s")
    passwords = json.loads((tmp_path / "s" / "credentials.json").read_text())["nats_passwords"]
    for service in subjects.SERVICES:
        text = (tmp_path / "s" / f"{service}.env").read_text()
        told = {user for user, password in passwords.items() if password in text}
        assert told == {service, subjects.OPERATOR}
        own = variables(tmp_path / "s" / f"{service}.env")
        assert own["KVASIR_BUS__USER"] == service
        assert own["KVASIR_BUS__PASSWORD"] == passwords[service]
        assert own[PASSWORD_VARIABLE] == passwords[subjects.OPERATOR]


def test_only_the_api_key_file_holds_the_key(tmp_path: Path) -> None:
    write_secrets(tmp_path)
    key = (tmp_path / "api_key").read_text().strip()
    assert re.fullmatch(r"sk-[0-9a-f]{48}", key)
    holding = {path.name for path in tmp_path.iterdir() if key in path.read_text()}
    assert holding == {"api_key", "credentials.json"}


def test_secrets_are_kept_and_private(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "s"
    assert main([str(folder)]) == 0
    first = {path.name: path.read_text() for path in folder.iterdir()}
    (folder / "worker.env").chmod(0o666)
    assert main([str(folder)]) == 0
    assert {path.name: path.read_text() for path in folder.iterdir()} == first
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}
    assert modes.pop("s") == 0o700
    assert modes.pop("nats.conf") == 0o644
    assert set(modes.values()) == {0o600}
    shown = capsys.readouterr().out
    assert str(folder / "api_key") in shown
    assert first["api_key"].strip() not in shown


def test_two_stacks_have_nothing_in_common(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_secrets(tmp_path / name)
    a, b = (json.loads((tmp_path / name / "credentials.json").read_text()) for name in ("a", "b"))
    assert a["api_key"] != b["api_key"]
    assert not set(a["nats_passwords"].values()) & set(b["nats_passwords"].values())


def test_every_container_is_fenced_in_and_asked_how_it_is(tmp_path: Path) -> None:
    write_secrets(tmp_path)
    services = services_of("docker-compose.yml")
    assert set(services) == STACK
    for name, service in services.items():
        assert service["init"] and service["read_only"] and service["cap_drop"] == ["ALL"], name
        asked = "nats" if name == "nats" else name if name.startswith("worker") else f"{name}-0"
        assert service["healthcheck"]["test"][-2:] == ["services.stack.healthcheck", asked]
        (env_file,) = service["env_file"]
        assert (tmp_path / Path(env_file).name).exists(), name
        waited_for = {} if name == "nats" else service["depends_on"]
        assert waited_for.keys() == (STACK - {"gateway"} if name == "gateway" else {"nats"} - {name})
        assert all(one == {"condition": "service_healthy"} for one in waited_for.values())
    assert [name for name, service in services.items() if "ports" in service] == ["gateway"]


def test_the_host_network_has_the_same_containers_without_ports() -> None:
    here, there = services_of("docker-compose.yml"), services_of("deploy/compose.host-network.yml")
    assert set(there) == STACK | {"gateway-host"}
    assert there["gateway"] == {"profiles": ["bridge-network"]}
    assert all(there[name]["network_mode"] == "host" for name in there if name != "gateway")
    alone = {"ports", "environment", "logging", "healthcheck"}
    twin = {key: value for key, value in there["gateway-host"].items() if key not in (*alone, "network_mode")}
    assert twin == {key: value for key, value in here["gateway"].items() if key not in alone}
    assert there["gateway-host"]["healthcheck"] == here["gateway"]["healthcheck"]


def test_the_example_swaps_one_service() -> None:
    assert set(services_of("deploy/compose.best-fit.yml")) == {"placement"}
