"""Which versions of vLLM are taken: those with all names that are used; else the first missing one is named.

Here vLLM is a package with the names of the table; `tests/vllm` checks the table in a real one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.worker.engine.vllm.versions import TABLE, Version
from tests.tasks import ROOT, ran

_CHECK = """
from services.worker.engine.vllm.versions import check_names, check_version, has
check_version(), check_names(), check_names("v1"), check_names("v2")
print(has("SchedulerOutput", "num_common_prefix_blocks"), has("runner", "batch_sharder", "v2"))
"""


def checked(folder: Path, number: Version, without: str = "") -> "subprocess.CompletedProcess[str]":
    """Check a vLLM of this version without one name or member."""
    names: dict[tuple[str, str], str] = {}
    for row in TABLE:
        if row.module and row.since <= number <= row.until and row.name != without:
            fields = "".join(f"; {each} = 0" for each in row.members.split() if each != without)
            names[row.module, row.name] = names.get((row.module, row.name), "") + fields
    for (module, name), fields in names.items():
        file = folder.joinpath(*module.split("."), "__init__.py")
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as lines:
            print(f"class {name}: pass{fields}", file=lines)
    (folder / "vllm").mkdir(exist_ok=True)
    with (folder / "vllm" / "__init__.py").open("a") as lines:
        print(f"__version__ = '{number[0]}.{number[1]}.1'", file=lines)
    return ran([sys.executable, "-c", _CHECK], env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"})


@pytest.mark.parametrize(("number", "seen"), [((0, 26), "True False"), ((0, 32), "False True")])
def test_a_known_version_is_taken_with_its_differences(tmp_path: Path, number: Version, seen: str) -> None:
    done = checked(tmp_path, number)
    assert done.stdout.strip() == seen and not done.stderr


def test_a_newer_version_is_tried_and_says_so(tmp_path: Path) -> None:
    done = checked(tmp_path, (1, 4))
    assert done.returncode == 0
    assert "vLLM 1.4.1 is tried: it is newer than 0.26 to 0.32" in done.stderr


@pytest.mark.parametrize("without", ["free_encoder_mm_hashes", "EngineCore"])
def test_the_first_missing_name_is_in_the_refusal(tmp_path: Path, without: str) -> None:
    done = checked(tmp_path, (1, 4), without)
    assert done.returncode != 0
    refusal = done.stderr.splitlines()[-1]
    assert refusal.partition("ConfigError: ")[2].startswith("vLLM 1.4.1 is not as Kvasir knows it: no ")
    assert f".{without}; Kvasir knows 0.26 to 0.32: run `make setup-vllm`" in refusal


def test_an_older_version_is_refused(tmp_path: Path) -> None:
    assert "vLLM 0.25.1 is not as Kvasir knows it: it is too old" in checked(tmp_path, (0, 25)).stderr
