"""Precedence."""

from pathlib import Path

import pytest

from shared.config import BusConfig, load
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


def test_defaults() -> None:
    config = loaded()
    assert (config.port, config.instance, config.log_level, config.log_format) == (
        8000,
        "gateway-0",
        "info",
        "auto",
    )
    assert config.bus == BusConfig() and config.bus.url == "nats://127.0.0.1:4222"


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
    assert (config.bus.url, config.bus.user, config.log_level) == (
        "nats://from-file:1",
        "own-user",
        "warning",
    )
    config = loaded(file, KVASIR_BUS__URL="nats://from-env:2", KVASIR_LOG_LEVEL="debug")
    assert (config.bus.url, config.bus.user, config.log_level) == ("nats://from-env:2", "own-user", "debug")
    config = loaded(file, KVASIR_BUS__URL="nats://all:2", KVASIR_GATEWAY__BUS__URL="nats://own:3")
    assert config.bus.url == "nats://own:3"
    assert (
        loaded(file, ["--bus.url", "nats://flag:4"], KVASIR_BUS__URL="nats://all:2").bus.url
        == "nats://flag:4"
    )


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


def test_an_empty_variable_is_none_at_all() -> None:
    assert loaded(KVASIR_BUS__URL="", KVASIR_GATEWAY__PORT="").port == 8000


def test_the_process_arguments_and_environment_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["services.gateway", "--port", "12"])
    monkeypatch.setenv("KVASIR_GATEWAY__INSTANCE", "gateway-3")
    config = load(GatewayConfig, section="gateway")
    assert (config.port, config.instance) == (12, "gateway-3")


def test_an_empty_file_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "kvasir.yaml"
    path.write_text("# nothing yet\ngateway:\n")
    assert loaded(path).port == 8000


def test_help_lists_settings_with_their_descriptions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        loaded(argv=["--help"])
    assert raised.value.code == 0
    text = capsys.readouterr().out
    for words in (
        "python -m services.gateway",
        "--config FILE",
        "--port",
        "where HTTP is served",
        "--bus.url",
    ):
        assert words in text
