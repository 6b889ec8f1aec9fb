"""The secrets for docker-compose.yml, and that the compose files use what is written and nothing else."""

import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509

from services.gateway.config import GatewayConfig
from services.stack.compose import POOL, main, write_secrets
from services.stack.config import StackConfig
from services.worker.config import WorkerConfig
from shared.config import load

ROOT = Path(__file__).resolve().parents[3]
GATEWAYS = {"gateway", "gateway-1"}
STACK = {"nats", "scheduler", "predictor", "placement", "ledger", "worker", *GATEWAYS}


def variables(path: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in path.read_text().splitlines())


def files_of(folder: Path) -> list[Path]:
    """However deep."""
    return [path for path in folder.rglob("*") if path.is_file()]


def services_of(file: str) -> dict[str, dict[str, Any]]:
    """Without those of profiles that are asked for by name."""
    services: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / file).read_text())["services"]
    return {n: one for n, one in services.items() if one.get("profiles") not in (["monitoring"], ["gpu"])}


def test_an_instance_is_told_its_own_password_and_nobody_elses(tmp_path: Path) -> None:
    """Not the operator's either: health checks run as who they check."""
    write_secrets(tmp_path / "s", "worker-16")
    passwords = json.loads((tmp_path / "s" / "credentials.json").read_text())["nats_passwords"]
    files = {path.stem: path for path in (tmp_path / "s").rglob("*.env")}
    prepared = StackConfig(gateways=2, schedulers=2, workers=17).instances
    assert files.keys() == {*prepared, "placement-1", "ledger-1"}
    for instance, path in files.items():
        text = path.read_text()
        assert path.parent.name == (POOL if instance.startswith("worker-") else "s")
        assert {user for user, password in passwords.items() if password in text} == {instance}
        own = variables(path)
        assert own["KVASIR_BUS__USER"] == instance and own["KVASIR_BUS__PASSWORD"] == passwords[instance]
        assert own["KVASIR_BUS__URL"].startswith("tls://")
        assert own["KVASIR_BUS__TLS_CA"] == "/run/secrets/nats_ca"


def test_instances_are_added_and_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "worker-16"]) == 0
    before = json.loads((tmp_path / "credentials.json").read_text())
    assert main([str(tmp_path), "worker-17"]) == 0
    after = json.loads((tmp_path / "credentials.json").read_text())
    assert after["nats_passwords"].items() > before["nats_passwords"].items()
    assert '"worker-16"' in (tmp_path / "nats.conf").read_text()
    assert main([str(tmp_path), "janitor-0"]) == 2 and "janitor-0" in capsys.readouterr().err


def test_only_the_api_key_file_holds_the_key(tmp_path: Path) -> None:
    write_secrets(tmp_path)
    key = (tmp_path / "api_key").read_text().strip()
    assert re.fullmatch(r"sk-[0-9a-f]{48}", key)
    holding = {path.name for path in files_of(tmp_path) if key in path.read_text()}
    assert holding == {"api_key", "credentials.json"}


def test_secrets_are_kept_and_private(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "s"
    assert main([str(folder)]) == 0
    first = {path.name: path.read_text() for path in files_of(folder)}
    (folder / "ledger-0.env").chmod(0o666)
    assert main([str(folder)]) == 0 and {path.name: path.read_text() for path in files_of(folder)} == first
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *files_of(folder))}
    assert modes.pop("s") == 0o700
    mounted: tuple[str, ...] = ("nats.conf", "server.pem", "server-key.pem", "ca.pem")
    mounted += tuple(name for name in modes if name.startswith("worker-"))
    assert {modes.pop(name) for name in mounted} == {0o644} and set(modes.values()) == {0o600}
    assert stat.S_IMODE((folder / POOL).stat().st_mode) == 0o755  # mounted itself
    shown = capsys.readouterr().out
    assert str(folder / "api_key") in shown and first["api_key"].strip() not in shown


def test_every_container_is_fenced_in_and_asked_how_it_is(tmp_path: Path) -> None:
    write_secrets(tmp_path)
    services = services_of("docker-compose.yml")
    assert set(services) == STACK
    for name, service in services.items():
        assert service["init"] and service["read_only"] and service["cap_drop"] == ["ALL"], name
        asked = name if name in ("nats", "worker") or name[-1].isdigit() else f"{name}-0"
        assert service["healthcheck"]["test"][-2:] == ["services.stack.healthcheck", asked]
        env_files = [Path(one).name for one in service.get("env_file", ())]
        assert env_files == ([] if name in ("nats", "worker") else [f"{asked}.env"])
        assert all((tmp_path / one).exists() for one in env_files), name
        waited_for = {} if name == "nats" else service["depends_on"]
        assert waited_for.keys() == (STACK - GATEWAYS if name in GATEWAYS else {"nats"} - {name})
        assert "nats_ca" in service["secrets"], name
        assert all(one == {"condition": "service_healthy"} for one in waited_for.values())
    assert {name for name, service in services.items() if "ports" in service} == GATEWAYS
    written = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["secrets"]
    for name in services["nats"]["secrets"]:
        path = written[name]["file"].partition("}")[2]
        assert (tmp_path / path.lstrip("/")).exists(), name


def test_nats_in_its_container_is_reached_by_tls_only(tmp_path: Path) -> None:
    write_secrets(tmp_path)
    text = (tmp_path / "nats.conf").read_text()
    assert '"/run/secrets/nats_cert"' in text and '"/run/secrets/nats_key"' in text
    assert "handshake_first: true" in text and str(tmp_path) not in text
    certificate = x509.load_pem_x509_certificate((tmp_path / "tls" / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "nats"]


def test_three_servers_in_containers_know_each_other_by_the_names_of_pods(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every configuration has container's paths; every instance is told of all servers."""
    assert main([str(tmp_path), "--nats-cluster", "2"]) == 2 and "write 1 or 3" in capsys.readouterr().err
    assert main([str(tmp_path), "--nats-cluster", "3"]) == 0
    hosts = [f"nats-{at}.nats" for at in range(3)]
    for at, host in enumerate(hosts):
        text = (tmp_path / f"nats-{at}.conf").read_text()
        assert str(tmp_path) not in text and f'advertise: "{host}:6222"' in text
        others = [other for other in hosts if other != host]
        assert re.findall(r"@([\w.-]+):6222", text) == others
    for path in tmp_path.rglob("*.env"):
        urls = variables(path)["KVASIR_BUS__URL"].split(",")
        assert sorted(urls) == [f"tls://{host}:4222" for host in hosts]
    there = yaml.safe_load((ROOT / "deploy" / "compose.nats-cluster.yml").read_text())
    assert [each["networks"]["default"]["aliases"] for each in there["services"].values()] == [
        [h] for h in hosts
    ]
    assert all(each["file"].endswith(f"/nats-{at}.conf") for at, each in enumerate(there["secrets"].values()))
    assert main([str(tmp_path), "worker-16"]) == 0 and '"worker-16"' in (tmp_path / "nats-2.conf").read_text()
    assert (
        main([str(tmp_path), "--nats-cluster", "1"]) == 2 and "does not name nats:" in capsys.readouterr().err
    )


def test_the_host_network_has_the_same_containers_without_ports() -> None:
    here, there = services_of("docker-compose.yml"), services_of("deploy/compose.host-network.yml")
    assert set(there) == STACK | {f"{name}-host" for name in GATEWAYS}
    assert all(there[name]["network_mode"] == "host" for name in there if name not in GATEWAYS)
    alone = {"ports", "environment", "logging", "healthcheck"}
    for name in GATEWAYS:
        assert there[name] == {"profiles": ["bridge-network"]}
        found = there[f"{name}-host"]
        twin = {key: value for key, value in found.items() if key not in (*alone, "network_mode")}
        assert twin == {key: value for key, value in here[name].items() if key not in alone}
        assert found["healthcheck"] == here[name]["healthcheck"]
    ports = [there[f"{name}-host"]["environment"]["KVASIR_GATEWAY__PORT"] for name in GATEWAYS]
    assert len(set(ports)) == len(GATEWAYS)


@pytest.mark.parametrize("file", ["docker-compose.yml", "deploy/compose.host-network.yml"])
def test_up_waits_for_a_slow_start(file: str) -> None:
    """It gives up on whoever is unhealthy once: on a busy machine workers took 105 s to start and a check
    9 s, and `up` ended without a gateway."""
    checks = [one["healthcheck"] for one in services_of(file).values() if "healthcheck" in one]
    assert checks and {check["start_period"] for check in checks} == {"5m"}
    assert {check["timeout"] for check in checks} == {"30s"}


def test_the_profile_gpu_is_a_worker_like_the_others_with_a_device(tmp_path: Path) -> None:
    """What it is told in its environment are settings that a worker takes."""
    write_secrets(tmp_path)
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    (name,) = (name for name, one in services.items() if one.get("profiles") == ["gpu"])
    service, other = services[name], services["worker"]
    told = {"profiles", "image", "build", "command", "environment", "deploy", "healthcheck", "scale"}
    assert {key: one for key, one in service.items() if key not in told} == {
        key: one for key, one in other.items() if key not in told
    }
    assert (ROOT / service["build"]["dockerfile"]).exists()
    assert service["healthcheck"]["test"][-1] == "worker" == service["command"][-1]
    assert service["environment"].items() > other["environment"].items()
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    environ = {
        key: re.sub(r"\$\{\w+:-(.*)\}", r"\1", one or "") for key, one in service["environment"].items()
    }
    made = load(WorkerConfig, "worker", [], environ)
    assert (made.engine, made.device, made.dtype, made.vllm.eager) == ("vllm", "cuda", "auto", False)


def test_monitoring_reads_the_operator_s_listener_where_it_is() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    watching = {name: one for name, one in services.items() if one.get("profiles") == ["monitoring"]}
    assert set(watching) == {"prometheus", "grafana"}
    for name, service in watching.items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"], name
        image, digest = service["image"].rstrip("}").split("@sha256:")
        assert re.search(r":v?\d+\.\d+\.\d+$", image) and re.fullmatch("[0-9a-f]{64}", digest)
        assert all((ROOT / mount.split(":")[0]).exists() for mount in service["volumes"] if mount[0] == ".")
    assert watching["prometheus"]["network_mode"] == "service:gateway"
    scraped = yaml.safe_load((ROOT / "deploy/monitoring/prometheus.yml").read_text())["scrape_configs"][0]
    port = GatewayConfig.model_validate({}).operator_port
    assert scraped["static_configs"] == [{"targets": [f"127.0.0.1:{port}"]}]
