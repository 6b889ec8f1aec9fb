"""The child table of Kvasir.

What people are shown while a stack starts.
"""

import io
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from services.stack import display
from services.stack.access import BusAccess
from services.stack.config import StackConfig
from services.stack.display import StartDisplay, say
from services.stack.probes import listens, serves
from services.stack.process import SeedLauncher, start_program
from services.stack.roll_call import RollCall, replies
from services.stack.rundir import RunDirectory
from services.stack.supervisor import Backoff, Child, ChildSpec, ChildState
from services.stack.table import Sources, kvasir_table, parse_override, workers_by_model
from shared.config import BusConfig
from shared.errors import ConfigError


async def table(
    path: Path,
    *overrides: str,
    config: StackConfig | None = None,
    environ: Mapping[str, str] | None = None,
    has_file: bool = True,
) -> dict[str, ChildSpec]:
    run = RunDirectory(path)
    run.create()
    specs = kvasir_table(
        config or StackConfig(workers=2),
        run,
        port=8080,
        access=BusAccess.to([4222], run.credentials(*(config or StackConfig()).instances), None),
        sources=Sources(
            path / "local.yaml" if has_file else None,
            [parse_override(text) for text in overrides],
            {"PATH": "/bin", **(environ or {})},
        ),
        roll=RollCall(BusConfig()),
    )
    return {spec.name: spec for spec in specs}


async def test_six_services_and_the_bus_with_the_gateway_ending_first(tmp_path: Path) -> None:
    specs = await table(tmp_path)
    services = ["gateway-0", "scheduler-0", "predictor-0", "placement-0", "ledger-0", "worker-0", "worker-1"]
    assert list(specs) == ["nats", "seed", *services]
    assert specs["worker-1"].argv[1:] == ("-m", "services.worker", "--instance", "worker-1")
    assert specs["nats"].launch is start_program
    assert all(isinstance(specs[service].launch, SeedLauncher) for service in services)
    imported = {argument for argument in specs["seed"].argv if argument.endswith(".service")}
    assert imported == {f"services.{name.rpartition('-')[0]}.service" for name in services}
    plain = await table(tmp_path, config=StackConfig(workers=1, preload=False))
    assert list(plain) == ["nats", *services[:-1]] and plain["worker-0"].launch is start_program
    assert specs["gateway-0"].stage > specs["worker-0"].stage > specs["nats"].stage
    probes = {"nats": listens, "gateway-0": serves, "ledger-0": replies}
    assert {name: getattr(specs[name].ready, "func", None) for name in probes} == probes


async def test_a_file_that_the_environment_names_is_not_overruled(tmp_path: Path) -> None:
    """Its `keys_file` and `state_dir` gave way to those of the run directory."""
    (tmp_path / "own.yaml").write_text("gateway: {keys_file: mine.json}\npredictor: {state_dir: there}\n")
    own = {"KVASIR_CONFIG": str(tmp_path / "own.yaml")}
    env = (await table(tmp_path, environ=own, has_file=False))["gateway-0"].env
    assert not {"KVASIR_GATEWAY__KEYS_FILE", "KVASIR_PREDICTOR__STATE_DIR"} & env.keys()


async def test_secrets_go_where_they_are_needed_only(tmp_path: Path) -> None:
    specs = await table(tmp_path)
    credentials = RunDirectory(tmp_path).credentials()
    gateway = specs["gateway-0"].env
    assert json.loads(gateway["KVASIR_GATEWAY__API_KEY_SHA256"]) == [credentials.api_key_sha256]
    passwords = credentials.nats_passwords
    for spec in specs.values():
        user = spec.name if "-" in spec.name else ""
        told = {name for name, password in passwords.items() if password in spec.env.values()}
        assert told == ({user} if user in passwords else set()), spec.name
        assert spec.env.get("KVASIR_BUS__USER") == (user or None)
        assert not any(password in word for word in spec.argv for password in passwords.values())
    assert gateway["KVASIR_CONFIG"] == str(tmp_path / "local.yaml") and specs["nats"].env == {"PATH": "/bin"}
    for spec in specs.values():
        assert credentials.api_key not in " ".join([*spec.env.values(), *spec.argv])


async def test_overrides_reach_one_service_one_instance_or_all(tmp_path: Path) -> None:
    specs = await table(
        tmp_path,
        "worker.kv_blocks=64",
        "worker-1.kv_blocks=32",
        "scheduler.policy_options.pad=1",
        "log_level=debug",
    )
    assert specs["worker-0"].env["KVASIR_WORKER__KV_BLOCKS"] == "64"
    assert specs["worker-1"].env["KVASIR_WORKER__KV_BLOCKS"] == "32"
    assert specs["scheduler-0"].env["KVASIR_SCHEDULER__POLICY_OPTIONS__PAD"] == "1"
    assert "KVASIR_WORKER__KV_BLOCKS" not in specs["gateway-0"].env
    assert specs["gateway-0"].env["KVASIR_LOG_LEVEL"] == "debug"


async def test_many_simulated_workers_share_processes(tmp_path: Path) -> None:
    """So that 32 are there within seconds; a few are alone, as are those that are told apart."""
    many = StackConfig(workers=30, engine="simulated")
    crews = {name: spec for name, spec in (await table(tmp_path, config=many)).items() if "worker" in name}
    assert [len(spec.instances) for spec in crews.values()] == [8, 8, 8, 6]
    env = crews["worker-8"].env
    assert env["KVASIR_WORKER__COUNT"] == "8" and env["KVASIR_BUS__USER"] == "worker-8"
    assert set(json.loads(env["KVASIR_WORKER__PASSWORDS"])) == {f"worker-{n}" for n in range(9, 16)}
    alone: list[tuple[StackConfig, tuple[str, ...]]] = [
        (StackConfig(workers=8, engine="simulated"), ()),
        (StackConfig(workers=30), ()),
        (many, ("worker-3.kv_blocks=9",)),
        (many, ("placement.scale=true",)),
        (many.model_copy(update={"workers_per_process": 1}), ()),
    ]
    for config, overrides in alone:
        specs = await table(tmp_path, *overrides, config=config)
        assert len([name for name in specs if name.startswith("worker-")]) == config.workers


async def test_a_model_is_the_same_for_all_who_need_it(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    specs = await table(tmp_path, config=StackConfig(workers=1, model=str(tmp_path / "mine")))
    for spec in (specs["gateway-0"], specs["worker-0"]):
        assert spec.env["KVASIR_GATEWAY__MODEL"] == spec.env["KVASIR_WORKER__MODEL"] == str(tmp_path / "mine")
        assert spec.env["KVASIR_GATEWAY__SERVED_NAME"] == spec.env["KVASIR_WORKER__SERVED_NAME"] == "mine"
    specs = await table(tmp_path, config=StackConfig(workers=1, model="someone/model"))
    assert specs["worker-0"].env["KVASIR_WORKER__MODEL"] == "someone/model"
    assert specs["gateway-0"].env["KVASIR_GATEWAY__SERVED_NAME"] == "model"
    specs = await table(tmp_path, config=StackConfig(workers=1, served_name="ours"))
    assert specs["gateway-0"].env["KVASIR_GATEWAY__SERVED_NAME"] == "ours"
    assert specs["worker-0"].env["KVASIR_WORKER__SERVED_NAME"] == "ours"
    with pytest.raises(ConfigError, match="--served-name"):
        await table(tmp_path, "worker.served_name=theirs")


async def test_models_take_turns_and_the_stack_knows_whose_a_worker_is(tmp_path: Path) -> None:
    config = StackConfig(workers=5, model="org/a", more_models=("bee=org/b",))
    first, second = ["worker-0", "worker-2", "worker-4"], ["worker-1", "worker-3"]
    assert workers_by_model(config) == {"a": first, "bee": second}
    specs = await table(tmp_path, "placement.scale=true", config=config)
    for model, workers in workers_by_model(config).items():
        assert {specs[name].env["KVASIR_WORKER__SERVED_NAME"] for name in workers} == {model}
    renamed = config.model_copy(update={"served_name": "ours"})
    assert list(workers_by_model(renamed)) == ["ours", "bee"]
    assert workers_by_model(StackConfig(workers=2)) == {"": ["worker-0", "worker-1"]}


async def test_the_gateway_is_where_the_stack_looks_for_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--port"):
        await table(tmp_path, "gateway.port=8123")


@pytest.mark.parametrize("text", ["kv_blocks=1", "worker.kv_blocks", "=1", "worker=1"])
def test_overrides_that_say_nothing_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"section\.setting=value"):
        parse_override(text)


@pytest.mark.parametrize(
    ("override", "variable", "file", "expected"),
    [
        (None, None, None, False),
        ("placement.scale=true", None, None, True),
        ("placement-0.scale=on", None, "placement: {scale: false}", True),
        ("placement.scale=false", "1", "placement: {scale: true}", False),
        (None, "1", None, True),
        (None, None, "placement: {scale: true}", True),
        (None, None, "placement: [scale]", False),
        ("placement.scale=perhaps", None, None, False),
        ("scheduler.relief=true", None, None, False),
    ],
)
def test_a_stack_is_scaled_only_where_its_configuration_says_so(
    tmp_path: Path, override: str | None, variable: str | None, file: str | None, expected: bool
) -> None:
    path = tmp_path / "local.yaml"
    path.write_text(file or "")
    environ = {} if variable is None else {"KVASIR_PLACEMENT__SCALE": variable}
    overrides = [] if override is None else [parse_override(override)]
    assert Sources(path, overrides, environ).is_scaled is expected
    assert Sources(None, overrides, {**environ, "KVASIR_CONFIG": str(path)}).is_scaled is expected


def children() -> list[Child]:
    specs = [ChildSpec(name, ("true",), {}) for name in ("nats", "worker-0")]
    ready, late = (Child(spec, Backoff()) for spec in specs)
    ready.state, late.obstacle = ChildState.READY, "loads its model"
    return [ready, late]


def test_plain_lines_name_who_is_late() -> None:
    console = Console(file=io.StringIO())
    with StartDisplay(console, children()) as shown:
        shown.tick()
        shown._shown_s -= display._PLAIN_EVERY_S
        shown.tick()
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "starting nats, worker-0"
    assert lines[1].endswith("waiting for worker-0 (loads its model)") and len(lines) == 2


def test_a_line_printed_above_the_table_shows_no_markup() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    with StartDisplay(console, children()) as shown:
        shown._show(0.0)
        say(console, "nats is started again")
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.count("loads its model") > 1 and "[dim]" not in text


async def test_a_worker_of_vllms_is_a_program_of_its_own_python(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.touch(mode=0o755)
    config = StackConfig(workers=2, vllm_python=python)
    specs = await table(tmp_path, "worker-1.engine=vllm", config=config)
    assert specs["worker-1"].argv == (str(python), "-m", "services.worker", "--instance", "worker-1")
    assert specs["worker-1"].launch is start_program and isinstance(specs["worker-0"].launch, SeedLauncher)
    assert "services.worker.building" in specs["seed"].argv
    (tmp_path / "local.yaml").write_text("worker: {engine: vllm}\n")
    specs = await table(tmp_path, config=config)
    assert {specs[f"worker-{number}"].argv[0] for number in range(2)} == {str(python)}
    assert "services.worker.building" not in specs["seed"].argv


async def test_without_vllm_there_is_no_such_worker(tmp_path: Path) -> None:
    config = StackConfig(workers=1, engine="vllm", vllm_python=tmp_path / "python")
    with pytest.raises(ConfigError, match=r"python is not there: run `make setup-vllm`"):
        await table(tmp_path, config=config)
