"""The command line: what is refused, and with which exit code."""

import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import services
from services.stack.cli import main
from shared.release import VERSION

UP = ["up", "--port=0", "--nats-port=0"]


def test_without_a_stack_there_is_nothing_to_look_at_or_talk_to(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    where = ["--run-dir", str(tmp_path)]
    assert main(["status", *where]) == 1
    assert main(["status", "--json", *where]) == 1
    assert '{"running": false}' in capfd.readouterr().out
    assert main(["chat", *where, "hello"]) == 1
    assert f"kvasir up --run-dir {tmp_path}` starts it" in capfd.readouterr().err
    assert main(["down", *where]) == 0
    assert f"nothing runs from {tmp_path}" in capfd.readouterr().out


def test_the_root_has_the_command_and_it_completes() -> None:
    """`./kvasir` runs from any folder, says its version, and its completion script is valid shell."""
    command = str(Path(services.__file__).parent.parent / "kvasir")
    run = partial(subprocess.run, capture_output=True, text=True, timeout=60, cwd="/", check=True)
    assert run([command, "--version"]).stdout == f"kvasir {VERSION}\n"
    script = run([command, "completion", "bash"]).stdout
    assert "credentials" in script
    run(["bash", "-n"], input=script)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["up", "--without", "nope"], "invalid choice: 'nope' (choose from"),
        (["up", "--port", "many"], "port: Input should be a valid integer"),
        (["up", "--set", "nonsense"], "--set 'nonsense': write it as section.setting=value"),
        ([*UP, "--workers", "0"], "workers: "),
        ([*UP, "--config", "none.yaml"], "none.yaml"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["statsu"], "'statsu' is unknown; did you mean 'status'?"),
        (["up", "--worker", "3"], "unrecognized argument --worker; did you mean --workers?"),
        (["status", "--jsn"], "unrecognized argument --jsn; did you mean --json?"),
        (
            [*UP, "--set", "woker.kv_blocks=64"],
            "--set woker.kv_blocks: no section 'woker'; did you mean",
        ),
        (
            [*UP, "--set", "worker.kv_block=64"],
            "--set worker.kv_block is no setting; did you mean --set w",
        ),
        (
            [*UP, "--set", "gateway.stored_responses.enabled=true"],
            "nothing is below --set gateway.stored_responses, which is one value",
        ),
        (["up", "--run-dir", "/proc/kvasir"], "the run directory /proc/kvasir cannot be written: "),
        (["up", "--detach", "--run-dir", "/proc/kvasir"], "the run directory /proc/kvasir cannot be written"),
        (["logs", "--run-dir", "/nowhere"], "/nowhere has no logs"),
    ],
)
def test_every_error_is_one_sentence_of_one_form(
    words: list[str], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """No usage text, no traceback, no name of an internal setting that nobody wrote."""
    where = ["--run-dir", str(tmp_path)] if words[: len(UP)] == UP else []
    try:
        code: object = main([*words, *where])
    except SystemExit as ended:
        code = ended.code
    out, err = capfd.readouterr()
    assert code == 2
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("error: ") and said in line


def test_help_shows_what_holds_without_a_flag(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["up", "--help"])
    said = " ".join(capfd.readouterr().out.split())
    for default in ("takes a free one [8080]", "how many worker processes [2]", "start has failed [180]"):
        assert default in said


def test_a_full_disk_is_said_before_anything_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=3_000_000))
    assert main(["up", "--run-dir", str(tmp_path / "run")]) == 2
    assert "is full: 3 MB free, 100 MB wanted" in capfd.readouterr().err
