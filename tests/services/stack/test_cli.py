"""The command line: what is refused, and with which exit code."""

from pathlib import Path

import pytest

from services.stack.cli import main


def test_wrong_settings_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    where = ["--run-dir", str(tmp_path)]
    assert main(["up", *where, "--workers", "0"]) == 2
    assert "workers" in capfd.readouterr().err
    assert main(["up", *where, "--set", "nonsense"]) == 2
    assert "section.setting=value" in capfd.readouterr().err
    assert main(["up", *where, "--config", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capfd.readouterr().err


def test_without_a_stack_there_is_nothing_to_look_at_or_talk_to(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    where = ["--run-dir", str(tmp_path)]
    assert main(["status", *where]) == 1
    assert main(["status", "--json", *where]) == 1
    assert '{"running": false}' in capfd.readouterr().out
    assert main(["chat", *where, "hello"]) == 1
    assert "`python -m services up` starts it" in capfd.readouterr().err
    assert main(["down", *where]) == 0
    assert f"nothing runs from {tmp_path}" in capfd.readouterr().out


def test_help_is_not_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["up", "--help"])
    assert ended.value.code == 0
    assert "--detach" in capfd.readouterr().out
