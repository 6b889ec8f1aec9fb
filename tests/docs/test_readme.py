"""README and docs name only targets, files, links and settings that exist; the tree in docs is the tree.

Other examples are drawn in every run, and a run that fails says how to draw its own again.
"""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from shared.config import load

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
RECIPES = (ROOT / "docs" / "recipes.md").read_text()
TARGETS = sorted(set(re.findall(r"`make ([a-z-]+)", README + RECIPES)))
FOLDERS = ("services", "shared", "sim", "bench", "models", "deploy", "docs", "tests")

FILES = {
    str(path.relative_to(ROOT))
    for folder in FOLDERS
    for ending in ("py", "cpp", "h", "md")
    for path in (ROOT / folder).rglob(f"*.{ending}")
}

DOCUMENTS = sorted(
    path for path in (*FILES, *(path.name for path in ROOT.glob("*.md"))) if path.endswith(".md")
)


@pytest.mark.parametrize("target", TARGETS)
def test_every_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.M)


def exists(named: str, document: str) -> bool:
    """Whether a file's path ends like this: in a service's README below that service, or its tests."""
    home = str(Path(document).parent)
    near = (f"{home}/", f"tests/{home}/") if home.startswith("services/") else ("",)
    return named in FILES or any(path.endswith(f"/{named}") and path.startswith(near) for path in FILES)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_and_link_in_a_document_leads_somewhere(document: str) -> None:
    """A file that moves takes its mentions along."""
    text = (ROOT / document).read_text()
    named = set(re.findall(r"`(?:…/)?([\w./-]+\.(?:py|cpp|h))(?::[^`]*)?`", text))
    links = set(re.findall(r"\]\((?!http|#)([^)#\s]+)", text))
    lost = {name for name in named if not exists(name, document)}
    lost |= {link for link in links if not (ROOT / document).parent.joinpath(link).exists()}
    assert lost == set()


def test_the_tree_is_the_tree() -> None:
    tree = (ROOT / "docs" / "architecture.md").read_text().split("## The tree")[1].split("```")[1]
    listed = {match.rstrip("/") for match in re.findall(r"^\s*([\w./-]+/)\s", tree, flags=re.M)}
    services = {path.name for path in (ROOT / "services").iterdir() if (path / "__init__.py").exists()}
    roots = {path.parent.name for path in ROOT.glob("*/__init__.py")} | {"docs"}
    assert services | roots <= listed
    for name in listed - services:
        assert (ROOT / name).is_dir()


def test_the_settings_exist_and_take_these_values() -> None:
    named = re.findall(r"--set (\w+)\.([\w.]+)=([\w.]+)", README + RECIPES)
    assert named
    for section, setting, value in named:
        config_type = getattr(import_module(f"services.{section}.config"), f"{section.capitalize()}Config")
        variable = f"KVASIR_{section}__{setting.replace('.', '__')}".upper()
        load(config_type, section, [], {variable: value}).check()


def test_examples_differ_from_run_to_run_where_hypothesis_sees_ci() -> None:
    """A bound that only some examples break was not seen there: they were the same every time."""
    script = (
        "import tests.conftest; from hypothesis import settings as s; print(s().derandomize, s().print_blob)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | {"CI": "true"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["False", "True"]


def test_a_failure_says_its_seed(tmp_path: Path) -> None:
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\necho "make $*"\ntest "$1" = check\n')
    make.chmod(0o755)
    said = []
    for number in (1, 2):
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SEED": str(number)}
        done = subprocess.run(
            [ROOT / ".ci" / "run"], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode != 0
        assert done.stdout.splitlines() == ["make check", f"make test ARGS=--hypothesis-seed={number}"]
        said.append(done.stderr.strip())
    assert said == [
        f"failed with this seed; again: make test ARGS=--hypothesis-seed={each}" for each in (1, 2)
    ]
