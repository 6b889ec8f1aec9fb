"""Errors a person can act on."""

from pathlib import Path

import pytest

from shared.config import load
from shared.errors import ConfigError
from tests.shared.config.gateway import GatewayConfig


@pytest.mark.parametrize(
    ("argv", "environ", "says"),
    [
        (["--port", "x"], {}, ["port: ", "'x'", "in the flags", "KVASIR_GATEWAY__PORT", "--port"]),
        ([], {"KVASIR_GATEWAY__PORT": "70000"}, ["port: ", "less than 65536", "in the environment"]),
        (["--prot", "1"], {}, ["--prot", "--help"]),
        ([], {"KVASIR_GATEWAY__PROT": "1"}, ["KVASIR_GATEWAY__PROT", "did you mean 'port'"]),
        ([], {"KVASIR_BUS__ULR": "1"}, ["KVASIR_BUS__ULR", "did you mean 'url'"]),
        (["--bus.url", "127.0.0.1:4222"], {}, ["bus.url: ", "nats://HOST:PORT"]),
        (["--instance", "a.b"], {}, ["instance: ", "no instance id"]),
        (["--config"], {}, ["--config", "YAML"]),
        (["--config", "/nowhere/kvasir.yaml"], {}, ["/nowhere/kvasir.yaml", "No such file"]),
        (["--log-level", "loud"], {}, ["log_level", "'info'"]),
    ],
)
def test_errors_name_the_setting_and_what_to_write(
    argv: list[str], environ: dict[str, str], says: list[str]
) -> None:
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
