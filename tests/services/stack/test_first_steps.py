"""`env`, `config` and `doctor`: what a newcomer asks the command for."""

import json
import os
import shlex
import socket
from pathlib import Path

import pytest

from services.stack.cli import main
from services.stack.rundir import ROOT, RunDirectory
from services.stack.settings import as_table


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
    assert main(["doctor", *where]) == 0
    said = capsys.readouterr().out
    assert "ok    memory" in said and "no  " not in [line[:4] for line in said.splitlines()]
    monkeypatch.setenv("PATH", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["doctor", *where, "--port", str(port)]) == 0
    said = capsys.readouterr().out
    assert f"{port}, wanted for HTTP, is taken by pid {os.getpid()}" in said and "--port 0" in said
    assert "note  compiler  none: install g++" in said
    assert main(["doctor", *where, "--model", str(tmp_path / "none")]) == 1
    assert "no    model" in capsys.readouterr().out
