"""Precedence.

Errors a person can act on.

What holds for every configuration.
"""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from shared.config import ModelServiceConfig, ServiceConfig, load
from shared.errors import ConfigError
from tests.shared.config.gateway import GatewayConfig

FILE = """
log_level: warning
bus:
  url: nats://from-file:1
  user: file-user
gateway:
  port: 1
  names: [a, b]
  bus: {user: own-user}
worker:
  port: anything
"""


def loaded(file: Path | None = None, argv: list[str] | None = None, **environ: str) -> GatewayConfig:
    flags = [*(["--config", str(file)] if file else []), *(argv or [])]
    return load(GatewayConfig, "gateway", flags, environ)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvasir.yaml"
    path.write_text(FILE)
    return path


def test_defaults_then_file_then_environment_then_flags(file: Path) -> None:
    layers: list[tuple[Path | None, dict[str, str], list[str], int]] = [
        (None, {}, [], 8000),
        (file, {}, [], 1),
        (file, {"KVASIR_GATEWAY__PORT": "2"}, [], 2),
        (file, {"KVASIR_GATEWAY__PORT": "2"}, ["--port", "3"], 3),
        (None, {"KVASIR_GATEWAY__PORT": "2"}, [], 2),
        (None, {}, ["--port=3"], 3),
    ]
    for path, environ, argv, port in layers:
        assert loaded(path, argv, **environ).port == port


def test_the_bus_is_configured_for_all_or_for_one(file: Path) -> None:
    config = loaded(file)
    found = (config.bus.url, config.bus.user, config.log_level)
    assert found == ("nats://from-file:1", "own-user", "warning")
    config = loaded(file, KVASIR_BUS__URL="nats://from-env:2", KVASIR_LOG_LEVEL="debug")
    assert (config.bus.url, config.bus.user, config.log_level) == ("nats://from-env:2", "own-user", "debug")
    config = loaded(file, KVASIR_BUS__URL="nats://all:2", KVASIR_GATEWAY__BUS__URL="nats://own:3")
    assert config.bus.url == "nats://own:3"
    both = loaded(file, ["--bus.url", "nats://flag:4"], KVASIR_BUS__URL="nats://all:2")
    assert both.bus.url == "nats://flag:4"


def test_the_environment_may_name_the_file(file: Path) -> None:
    assert loaded(KVASIR_CONFIG=str(file)).names == ("a", "b")


def test_flags_may_be_written_with_dashes() -> None:
    config = loaded(
        argv=["--log-level", "error", "--bus.connect-timeout-s=3", "--hot", "true", "--instance", "gateway-7"]
    )
    assert (config.log_level, config.bus.connect_timeout_s, config.hot) == ("error", 3.0, True)
    assert config.instance == "gateway-7"


def test_collections_in_the_environment_are_json() -> None:
    assert loaded(KVASIR_GATEWAY__NAMES='["x", "y"]').names == ("x", "y")
    with pytest.raises(ConfigError, match="names"):
        loaded(KVASIR_GATEWAY__NAMES="x, y")


def test_the_process_arguments_and_environment_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["services.gateway", "--port", "12"])
    monkeypatch.setenv("KVASIR_GATEWAY__INSTANCE", "gateway-3")
    config = load(GatewayConfig, section="gateway")
    assert (config.port, config.instance) == (12, "gateway-3")


def test_help_lists_settings_with_their_descriptions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        loaded(argv=["--help"])
    assert raised.value.code == 0
    text = capsys.readouterr().out
    for words in ("python -m services.gateway", "--config FILE", "--port", "where HTTP is", "--bus.url"):
        assert words in text


@pytest.mark.parametrize(
    ("argv", "environ", "says"),
    [
        (["--port", "x"], {}, ["port: ", "'x'", "in the flags", "KVASIR_GATEWAY__PORT", "--port"]),
        ([], {"KVASIR_GATEWAY__PORT": "70000"}, ["port: ", "less than 65536", "in the environment"]),
        (["--prot", "1"], {}, ["--prot is no setting; did you mean --port?"]),
        ([], {"KVASIR_GATEWAY__PROT": "1"}, ["KVASIR_GATEWAY__PROT", "did you mean KVASIR_GATEWAY__PORT?"]),
        ([], {"KVASIR_BUS__ULR": "1"}, ["KVASIR_BUS__ULR", "did you mean KVASIR_BUS__URL?"]),
        ([], {"KVASIR_GATWAY__PORT": "1"}, ["no section GATWAY", "did you mean KVASIR_GATEWAY__PORT?"]),
        (["--log-levle", "info"], {}, ["--log-levle is no setting; did you mean --log-level?"]),
        (["--port.high", "1"], {}, ["--port.high: nothing is below --port, which is one value"]),
        ([], {"KVASIR_GATEWAY__PORT__HIGH": "1"}, ["nothing is below KVASIR_GATEWAY__PORT"]),
        ([], {"KVASIR_LOG_LEVEL__ROOT": "info"}, ["nothing is below KVASIR_LOG_LEVEL"]),
        (["--bus.url", "127.0.0.1:4222"], {}, ["bus.url: ", "nats://HOST:PORT"]),
        (["--instance", "a.b"], {}, ["instance: ", "no instance id"]),
        (["--config"], {}, ["--config", "YAML"]),
        (["--config", "/nowhere/kvasir.yaml"], {}, ["/nowhere/kvasir.yaml", "No such file"]),
        (["--log-level", "loud"], {}, ["log_level", "'info'"]),
    ],
)
def test_errors_name_the_setting(argv: list[str], environ: dict[str, str], says: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        load(GatewayConfig, "gateway", argv, environ)
    for words in says:
        assert words in str(raised.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("gateway: {prot: 1}", "prot: no such setting in the file; did you mean 'port'?"),
        ("gateway: {bus: {ulr: x}}", "bus.ulr: no such setting in the file; did you mean 'url'?"),
        ("gatway: {port: 1}", "no section 'gatway'; did you mean 'gateway'?"),
        ("gateway: 5", "gateway has no settings below it"),
        ("- a list", "write `section:`"),
        ("gateway: {port: [}", "is not YAML"),
        (
            "bus: {connect_timeout_s: -1}",
            "bus.connect_timeout_s: Input should be greater than 0; got -1 in the file",
        ),
    ],
)
def test_errors_in_the_file(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "kvasir.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as raised:
        load(GatewayConfig, "gateway", ["--config", str(path)], {})
    assert says in str(raised.value)


@pytest.mark.parametrize(
    "content", ["bus: {password: [hunter2]}", "bus: {pasword: hunter2}", "gateway: {api_key: [hunter2]}"]
)
def test_secrets_are_shown_neither_in_errors_nor_in_the_configuration(tmp_path: Path, content: str) -> None:
    path = tmp_path / "kvasir.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as raised:
        load(GatewayConfig, "gateway", ["--config", str(path)], {})
    assert "hunter2" not in str(raised.value)
    config = load(GatewayConfig, "gateway", [], {"KVASIR_BUS__PASSWORD": "hunter2"})
    assert config.bus.password is not None and config.bus.password.get_secret_value() == "hunter2"
    assert "hunter2" not in repr(config)


def test_it_is_frozen_and_reads_nothing_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_GATEWAY__PORT", "9")
    monkeypatch.setenv("KVASIR_PORT", "9")
    config = GatewayConfig(port=7)
    assert config.port == 7 and GatewayConfig().port == 8000
    with pytest.raises(ValidationError, match="frozen"):
        config.port = 8
    with pytest.raises(ValidationError, match="frozen"):
        config.bus.url = "nats://x:1"


def test_the_default_instance_follows_the_class() -> None:
    class LongNamedConfig(ServiceConfig):
        pass

    given: dict[str, Any] = {"instance": "other-1"}
    assert LongNamedConfig().instance == "long-named-0" and LongNamedConfig(**given).instance == "other-1"


def test_a_model_is_called_by_the_last_part_of_where_it_is_unless_it_is_named() -> None:
    assert ModelServiceConfig().served_name == "tiny_chat"
    assert ModelServiceConfig(model="someone/big-one").served_name == "big-one"
    assert ModelServiceConfig(model="/data/models/mine/", served_name="ours").served_name == "ours"
