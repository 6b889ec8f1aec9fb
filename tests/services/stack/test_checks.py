"""All settings of all services are looked at before the first process is started.

Keeps from coming back: 15 s of starting processes that end with "exit code 2" and a log in JSON, and mistakes
that are told one at a time.
"""

import shutil
import sys
import time
from contextlib import AbstractContextManager, nullcontext
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


def test_a_disk_tier_that_was_asked_for_can_be_opened(tmp_path: Path) -> None:
    """Before anything starts; a worker that is restarted later goes on without it, and says so."""
    (tmp_path / "file").touch()
    tier = {"prefix_cache__disk_mb": "8", "prefix_cache__disk_path": str(tmp_path / "file")}
    with pytest.raises(ConfigError, match=r"worker-0: the disk tier .*disk_path, or leave out disk_mb"):
        check_settings([child("worker-0", **tier)], ROOT)
    there = {**tier, "prefix_cache__disk_path": str(tmp_path / "there")}
    check_settings([child("worker-0", **there)], ROOT)
    assert not list((tmp_path / "there").iterdir()), "it only looks"
    with pytest.raises(ConfigError, match=r"has room for \d+ MB of 999999999"):
        check_settings([child("worker-0", **{**there, "prefix_cache__disk_mb": "999999999"})], ROOT)


@pytest.mark.parametrize(("cuda", "is_refused"), [("None", True), ("'12.8'", False)])
def test_a_gpu_needs_a_torch_that_was_built_for_it(
    cuda: str, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    version = f"__version__ = '2.13.0+cpu'\ncuda: Optional[str] = {cuda}\nhip: Optional[str] = None\n"
    (tmp_path / "torch" / "version.py").write_text(version)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    said: AbstractContextManager[object] = nullcontext()
    if is_refused:
        said = pytest.raises(ConfigError, match=r"torch 2\.13\.0\+cpu is built without CUDA.*TORCH=cuda")
    with said:
        check_settings([child("worker-0", device="cuda")], ROOT)


def test_a_broken_chat_template_is_found_before_anything_starts(tmp_path: Path) -> None:
    model = tmp_path / "broken"
    shutil.copytree(ROOT / "models" / "tiny_chat", model)
    (model / "chat_template.jinja").write_text("{% for message in messages %}\n{{ message.content")
    with pytest.raises(ConfigError, match=r"the chat template of .*/broken cannot be used: .*line 2"):
        check_settings([child("gateway-0", model=str(model))], ROOT)
