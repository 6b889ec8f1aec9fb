"""`env`, `config` and `doctor`: what a newcomer asks the command for."""

import json
import os
import shlex
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.stack.cli import main
from services.stack.models import DEFAULT
from services.stack.rundir import ROOT, RunDirectory
from services.stack.settings import as_table
from shared.model_files import parameters_of
from tests.gguf_rig import of_folder

_ABOUT = ("model ", "memory")


def test_env_is_shell_that_sets_what_clients_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--run-dir", str(tmp_path)]) == 2
    assert "nothing runs" in capsys.readouterr().err
    run = RunDirectory(tmp_path)
    run.create()
    assert run.acquire()
    run.write_state({"pid": os.getpid(), "url": "http://127.0.0.1:8099", "children": []})
    assert main(["env", "--run-dir", str(tmp_path)]) == 0
    words = [shlex.split(line.removesuffix(";"))[1] for line in capsys.readouterr().out.splitlines()]
    told = dict(word.split("=", 1) for word in words)
    key = run.credentials().api_key
    assert told == {
        "OPENAI_BASE_URL": "http://127.0.0.1:8099/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:8099",
        "ANTHROPIC_API_KEY": key,
    }


def test_config_says_what_is_in_force_and_where_each_value_comes_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kvasir.yaml"
    file.write_text("worker:\n  threads: 2\n  kv_blocks: 100\nstack:\n  workers: 3\n")
    monkeypatch.setenv("KVASIR_GATEWAY__PORT", "9000")
    words = ["config", "--config", str(file), "--set", "worker.kv_blocks=64"]
    words += ["--set", "worker.pie.enabled=false"]
    assert main(words) == 0
    lines = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    assert lines == {
        "stack.workers 3 (file)",
        "gateway.port 9000 (environment)",
        "worker.threads 2 (file)",
        "worker.kv_blocks 64 (--set)",
        "worker.pie.enabled false (--set)",
    }
    assert main([*words, "worker", "--all"]) == 0
    shown = capsys.readouterr().out
    assert "worker.heartbeat_s " in shown and "(default)" in shown and "gateway.port" not in shown
    assert main(["config", "woker"]) == 2
    assert "no section 'woker'; did you mean 'worker'?" in capsys.readouterr().err


def test_config_shows_no_secret(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_WORKER__PASSWORDS", json.dumps({"worker-1": "not for eyes"}))
    assert main(["config", "worker"]) == 0
    assert "not for eyes" not in capsys.readouterr().out


def test_the_page_of_settings_is_what_the_command_writes() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == "\n".join([*as_table(), ""]), (
        "write it anew: ./kvasir config --markdown > docs/settings.md"
    )


def test_doctor_names_what_is_missing_and_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ["--run-dir", str(tmp_path)]
    monkeypatch.setenv("KVASIR_CACHE", str(tmp_path))
    assert main(["doctor", *where]) == 0
    said = capsys.readouterr().out
    assert f"{DEFAULT} is not here: ./kvasir models pull" in said and "ok    memory" in said
    assert "no  " not in [line[:4] for line in said.splitlines()]
    monkeypatch.setenv("PATH", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["doctor", *where, "--port", str(port)]) == 0
    said = capsys.readouterr().out
    assert f"{port}, wanted for HTTP, is taken by pid {os.getpid()}" in said and "--port 0" in said
    assert "note  compiler  none: install g++" in said
    assert main(["doctor", *where, "--model", str(tmp_path / "none")]) == 1
    assert "no    model" in capsys.readouterr().out


def test_doctor_looks_at_the_model_that_would_be_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(model: str, code: int = 0) -> str:
        assert main(["doctor", "--run-dir", str(tmp_path), "--workers", "3", "--model", model]) == code
        return "\n".join(line for line in capsys.readouterr().out.splitlines() if line[6:12] in _ABOUT)

    monkeypatch.setenv("KVASIR_CACHE", str(tmp_path))
    tiny, floats = ROOT / "models" / "tiny_chat", tmp_path / "models" / f"{DEFAULT}.Q4_1.gguf"
    floats.parent.mkdir()
    of_folder(floats, tiny)
    bytes_of_folder = parameters_of(tiny) * 4
    assert abs(bytes_of_folder - floats.stat().st_size) < bytes_of_folder / 4
    assert f"ok    model     {DEFAULT} is here" in said(DEFAULT)
    for model in (str(tiny), str(floats)):
        assert f"3 × {0.2 + bytes_of_folder * 1.3 / 1e9:.2f} GB" in said(model)
    snapshots = tmp_path / "models--org--tiny" / "snapshots"
    snapshots.mkdir(parents=True)
    (snapshots / ("0" * 40)).symlink_to(tiny)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert f"ok    model     tiny is here: {snapshots}" in said(f"org/tiny@{'0' * 40}")
    assert "the first start downloads it" in said("org/other")
    assert "./kvasir models pull Qwen3-0.6B fetches it" in said("Qwen3-0.6B", 1)
    assert "did you mean 'tiny_chat'" in said("tiny_chart", 1)
    floats.write_bytes(floats.read_bytes()[:9000])
    assert "is cut short" in said(str(floats), 1)
    monkeypatch.setattr("services.stack.doctor.psutil.virtual_memory", lambda: SimpleNamespace(available=4e8))
    assert "start with --workers 1" in said(str(tiny), 1)
