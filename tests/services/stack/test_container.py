"""A container takes a worker's name from the pool, and its model from one variable."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from services.stack import container
from services.stack.compose import write_secrets
from services.stack.container import model_flags, take_name, with_own_name
from services.stack.models import DEFAULT
from services.stack.rundir import ROOT
from shared.errors import ConfigError
from tests.patience import PATIENCE_S

TAKE = """
import os, sys
from pathlib import Path
from services.stack.container import take_name
own = take_name(Path(sys.argv[1]), Path(sys.argv[2]))
show = "import sys; print(sys.argv[1], flush=True); sys.stdin.read()"
os.execv(sys.executable, [sys.executable, "-c", show, own["KVASIR_BUS__USER"]])
"""
"""Takes a name, becomes another program, as a container does, and prints the name."""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Path]:
    """Three of the names that are written for containers."""
    write_secrets(tmp_path / "s")
    pool = tmp_path / "s" / "workers"
    for number in range(3, 16):
        (pool / f"worker-{number}.env").unlink()
    yield pool
    for opened in list(Path("/proc/self/fd").iterdir()):
        if opened.resolve().parent == pool:  # a lock that this process took
            os.close(int(opened.name))


def started(pool: Path, number: int, running: ExitStack) -> tuple[subprocess.Popen[str], str]:
    """A process that took a name, and the name."""
    command = [sys.executable, "-c", TAKE, str(pool), str(pool.parent / f"taken-{number}")]
    process = running.enter_context(
        subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    )
    running.callback(process.kill)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_each_worker_takes_a_name_and_a_killed_one_gives_it_back(pool: Path, tmp_path: Path) -> None:
    with ExitStack() as running:
        begun = [started(pool, number, running) for number in range(3)]
        assert [name for _, name in begun] == ["worker-0", "worker-1", "worker-2"]
        with pytest.raises(ConfigError, match=r"all 3 names .* deploy/secrets worker-3"):
            take_name(pool, tmp_path / "taken")
        killed, name = begun[1]
        killed.kill()
        killed.wait(PATIENCE_S)
        own = take_name(pool, tmp_path / "taken")
        assert own["KVASIR_BUS__USER"] == name and own["KVASIR_BUS__PASSWORD"]


def test_a_health_check_asks_for_the_name_that_was_taken(pool: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    with pytest.raises(ConfigError, match="no name yet"):
        with_own_name({}, taken)
    own = take_name(pool, taken)
    assert with_own_name({}, taken) == own
    elsewhere = {"KVASIR_BUS__URL": "tls://127.0.0.1:4333"}  # of the container's own environment
    assert with_own_name(elsewhere, taken) == own | elsewhere


def test_one_variable_names_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of ./models, a file, an id of the hub, a name that `kvasir models` knows."""
    monkeypatch.setenv("KVASIR_CACHE", str(tmp_path))
    tiny = str(ROOT / "models" / "tiny_chat")
    assert model_flags("tiny_chat") == ["--model", tiny, "--served-name", "tiny_chat"]
    assert model_flags(f"chat={tiny}") == ["--model", tiny, "--served-name", "chat"]
    assert model_flags("ORG/NAME@main") == ["--model", "ORG/NAME@main", "--served-name", "NAME"]
    hub = ["--model", "Qwen/Qwen3-0.6B", "--served-name", "Qwen3-0.6B"]
    assert model_flags("Qwen3-0.6B") == hub
    with pytest.raises(ConfigError, match="'qwen9' is not here"):
        model_flags("qwen9")


def test_the_default_model_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_CACHE", str(tmp_path))
    file = tmp_path / "models" / f"{DEFAULT}.Q4_1.gguf"
    file.parent.mkdir()
    file.write_bytes(b"GGUF")
    assert model_flags(DEFAULT) == ["--model", str(file), "--served-name", DEFAULT]


def test_what_cannot_start_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVASIR_MODEL", "qwen9")
    assert container.main(["gateway-0"]) == 2 and "'qwen9' is not here" in capsys.readouterr().err
    assert container.main(["janitor-0"]) == 2 and "'janitor-0' is no instance" in capsys.readouterr().err
