"""The secrets for docker-compose.yml, and that the compose files use what is written and nothing else."""

import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.stack.compose import main, write_secrets
from services.stack.config import StackConfig

ROOT = Path(__file__).resolve().parents[3]
STACK = {"nats", "scheduler", "predictor", "placement", "ledger", "worker-0", "worker-1", "gateway"}


def variables(path: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in path.read_text().splitlines())


def services_of(file: str) -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / file).read_text())["services"]
    return services


def test_an_instance_is_told_its_own_password_and_nobody_elses(tmp_path: Path) -> None:
    """Not the operator's either: health checks run as who they check."""
    write_secrets(tmp_path / "s", "worker-2")
    passwords = json.loads((tmp_path / "s" / "credentials.json").read_text())["nats_passwords"]
    files = {path.stem for path in (tmp_path / "s").glob("*.env")}
    assert files == {*StackConfig().instances, "worker-2"}
    for instance in files:
        text = (tmp_path / "s" / f"{instance}.env").read_text()
        assert {user for user, password in passwords.items() if password in text} == {instance}
        own = variables(tmp_path / "s" / f"{instance}.env")
        assert own["KVASIR_BUS__USER"] == instance
        assert own["KVASIR_BUS__PASSWORD"] == passwords[instance]


def test_instances_are_added_and_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "worker-2"]) == 0
    before = json.loads((tmp_path / "credentials.json").read_text())
    assert main([str(tmp_path), "worker-3"]) == 0
    after = json.loads((tmp_path / "credentials.json").read_text())
    assert after["nats_passwords"].items() > before["nats_passwords"].items()
    assert '"worker-2"' in (tmp_path / "nats.conf").read_text()
    assert main([str(tmp_path), "janitor-0"]) == 2
    assert "janitor-0" in capsys.readouterr().err


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
    (folder / "worker-0.env").chmod(0o666)
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
        env_files = [Path(one).name for one in service.get("env_file", ())]
        assert env_files == ([] if name == "nats" else [f"{asked}.env"])
        assert all((tmp_path / one).exists() for one in env_files), name
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


@pytest.mark.parametrize("file", ["docker-compose.yml", "deploy/compose.host-network.yml"])
def test_up_waits_for_a_slow_start(file: str) -> None:
    """It gives up on whoever is unhealthy once: on a busy machine workers took 105 s to start and a check
    9 s, and `up` ended without a gateway."""
    checks = [one["healthcheck"] for one in services_of(file).values() if "healthcheck" in one]
    assert checks
    assert {check["start_period"] for check in checks} == {"5m"}
    assert {check["timeout"] for check in checks} == {"30s"}


def test_the_example_swaps_one_service() -> None:
    assert set(services_of("deploy/compose.best-fit.yml")) == {"placement"}
