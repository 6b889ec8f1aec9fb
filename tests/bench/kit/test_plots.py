"""Benches measure without matplotlib, which `make up` does not install.

Keeps from coming back: documented commands that end in an ImportError after `make up`.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
DEVELOPMENT_ONLY = ("matplotlib", "msgpack", "pytest", "hypothesis", "openai", "jsonschema", "mypy")
HIDE = f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {DEVELOPMENT_ONLY!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in {DEVELOPMENT_ONLY!r} else found(name, *rest)
sys.path.insert(0, ".")
"""


def without_development_packages(program: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """Runs a program as it would run in an environment that `make up` made."""
    command = [sys.executable, "-c", f"{HIDE}\nsys.argv = {['program', *words]!r}\n{program}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


def test_every_bench_loads() -> None:
    program = "from bench.registry import BENCHES\nfor bench in BENCHES:\n    bench.load()"
    ran = without_development_packages(program)
    assert ran.returncode == 0, ran.stderr


def test_an_experiment_runs_and_says_that_it_draws_nothing(tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text("grid: {rate: [1.0, 2.0]}\nrequests: 20\n")
    asked = ["experiment", str(tmp_path / "two.yaml"), "--into", str(tmp_path), "--json", "-"]
    ran = without_development_packages("from bench.cli import main\nsys.exit(main(sys.argv[1:]))", *asked)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("no pictures, as matplotlib is not installed") == 1
    assert (tmp_path / "summary.md").exists() or list(tmp_path.rglob("summary.md"))
