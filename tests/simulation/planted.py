"""Planted bugs: patches in `bugs/`, each applied to a copy of what is simulated. Which seeds find them?

python -m tests.simulation.planted [--bug NAME] [--schedules N]
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUGS = Path(__file__).resolve().parent / "bugs"
_COPIED = ("services", "shared", "tests/simulation")
_LINKED = ("models", "sim")
_FOUND = re.compile(r"^seed (\d+): (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Found:
    """By which seed, and what was seen."""

    seed: int
    violation: str


def names() -> list[str]:
    """Of all bugs."""
    return sorted(path.stem for path in BUGS.glob("*.patch"))


def find(name: str, schedules: int, processes: int, first: int = 0) -> Found | None:
    """The first seed of so many that finds it; None: nobody did."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder)
        for part in _COPIED:
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(ROOT / part, copy / part, ignore=ignored)
        (copy / "tests" / "__init__.py").touch()
        for part in _LINKED:
            (copy / part).symlink_to(ROOT / part)
        patch = ["patch", "--strip=1", "--forward", "--silent", "--input", str(BUGS / f"{name}.patch")]
        subprocess.run(patch, cwd=copy, check=True)
        command = [sys.executable, "-m", "tests.simulation", "--stop", "--first", str(first)]
        command += ["--schedules", str(schedules), "--processes", str(processes)]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    seen = _FOUND.search(done.stdout)
    if seen is None and done.returncode:
        raise RuntimeError(f"the simulation of {name} failed: {done.stderr[-2000:]}")
    return None if seen is None else Found(int(seen[1]), seen[2])


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="tests.simulation.planted", description=__doc__)
    parser.add_argument("--bug", action="append", choices=names())
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    missed = 0
    for name in arguments.bug or names():
        found = find(name, arguments.schedules, arguments.processes)
        missed += found is None
        told = "not found" if found is None else f"seed {found.seed}: {found.violation[:160]}"
        print(f"{name}: {told}", flush=True)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
