"""All settings of all services are looked at before the first process is started.

Keeps from coming back: 15 s of starting processes that end with "exit code 2" and a log in JSON, and mistakes
that are told one at a time.
"""

import time
from pathlib import Path

import pytest

from services.stack.cli import main
from services.stack.obstructions import check_settings
from services.stack.supervisor import ChildSpec
from shared.errors import ConfigError

ROOT = Path(__file__).parents[3]


def child(instance: str, **settings: str) -> ChildSpec:
    service = instance.rpartition("-")[0]
    env = {f"KVASIR_{service.upper()}__{name.upper()}": value for name, value in settings.items()}
    return ChildSpec(instance, ("python", "-m", f"services.{service}", "--instance", instance), env)


def test_what_is_right_passes_and_what_is_no_service_is_left_alone() -> None:
    names = ("gateway-0", "scheduler-0", "predictor-0", "placement-0", "ledger-0", "worker-0")
    check_settings([ChildSpec("nats", ("nats-server",), {}), *map(child, names)], ROOT)


def test_everything_that_is_wrong_is_told_at_once() -> None:
    specs = [
        child("scheduler-0", policy="nope"),
        child("placement-0", order="nope", policy="nope"),
        child("predictor-0", model="nope"),
        child("worker-0", kv_blocks="-1"),
        child("worker-1", device="toaster"),
    ]
    with pytest.raises(ConfigError) as raised:
        check_settings(specs, ROOT)
    lines = raised.value.message.split("\nerror: ")
    starts = ["scheduler-0: batching policy 'nope'", "placement-0: order", "predictor-0: length model 'nope'"]
    starts += ["worker-0: kv_blocks", "worker-1: device"]
    assert [line.startswith(start) for line, start in zip(lines, starts, strict=True)] == [True] * 5


def test_what_several_share_is_told_once() -> None:
    shared = [child("gateway-0", model="models/nope"), child("worker-0", model="models/nope")]
    with pytest.raises(ConfigError) as raised:
        check_settings(shared, ROOT)
    first = raised.value.message.partition("\n")[0]
    assert first == "model 'models/nope': no such folder; models has tiny_chat"
    with pytest.raises(ConfigError, match=r"^worker: kv_blocks"):
        check_settings([child("worker-0", kv_blocks="-1"), child("worker-1", kv_blocks="-1")], ROOT)


def test_up_starts_no_process_where_a_setting_is_wrong(
    tmp_path: Path, free_port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut"
    cut.mkdir()
    whole = ROOT / "models" / "tiny_chat"
    for file in whole.glob("*.json"):
        (cut / file.name).write_bytes(file.read_bytes())
    (cut / "model.safetensors").write_bytes((whole / "model.safetensors").read_bytes()[:100_000])
    words = ["up", "--run-dir", str(tmp_path / "run"), "--port", str(free_port), "--nats-port", "0"]
    began_s = time.monotonic()
    assert main([*words, "--model", str(cut)]) == 2
    out, err = capfd.readouterr()
    assert err.startswith(f"error: worker: {cut}/model.safetensors is cut short, 100,000 of 12,")
    assert len(err.splitlines()) == 1 and "starting" not in out
    assert not list((tmp_path / "run" / "logs").iterdir())
    assert time.monotonic() - began_s < 30
