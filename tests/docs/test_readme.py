"""README and docs name only what exists: targets, files, links, settings, fields, subjects."""

import ast
import os
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

from bench.house import layers
from services.gateway.openai.fields import DESCRIPTIONS, IGNORED, REFUSED, REQUESTS, table
from services.scheduler.core.sequence import mermaid
from shared import subjects
from shared.config import load
from tests.tasks import ran

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

DOCUMENTS = sorted(p for p in (*FILES, *(p.name for p in ROOT.glob("*.md"))) if p.endswith(".md"))


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
        "import tests.conftest, hypothesis; s = hypothesis.settings(); print(s.derandomize, s.print_blob)"
    )
    done = ran([sys.executable, "-c", script], env=os.environ | {"CI": "true"}, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_a_failure_says_its_seed(tmp_path: Path) -> None:
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\necho "make $*"\nfor last; do :; done\ntest "$last" = check\n')
    make.chmod(0o755)
    said, first = [], "make -j2 --output-sync=target check"
    for number in (1, 2):
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SEED": str(number)}
        done = ran([ROOT / ".ci" / "run"], env=environment)
        assert done.returncode != 0
        assert done.stdout.splitlines() == [first, f"make test ARGS=--hypothesis-seed={number}"]
        said.append(done.stderr.strip())
    assert said == [f"failed with this seed; again: make test ARGS=--hypothesis-seed={n}" for n in (1, 2)]


DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_table_is_the_codes() -> None:
    again = "write it again: python -m services.gateway.openai.fields > docs/fields.md"
    assert (DOCS / "fields.md").read_text() == table(), again


def test_every_field_is_described_once() -> None:
    honoured = {name for each in REQUESTS for name in each.model_fields}
    assert set(DESCRIPTIONS) == honoured and not IGNORED & (honoured | set(REFUSED))


DOCUMENT = (ROOT / "docs" / "request-lifecycle.md").read_text()
PLACES = sorted(set(re.findall(r"`([\w/]+\.py):([\w.]+)`", DOCUMENT)))
SUBJECTS = sorted(set(re.findall(r"`((?:cmd|evt|tok)\.[\w.<> ]+)`", DOCUMENT)))


def defined_names(path: Path) -> set[str]:
    """Functions and classes of a module, methods as `Class.method`."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [m for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef)]
            names |= {f"{node.name}.{method.name}" for method in methods}
    return names


def known_subjects() -> set[str]:
    """Every subject that some user may use, with `<id>` where an instance id goes, less the prefix."""
    users = [f"{service}-0" for service in subjects.SERVICES]
    table = [subjects.permissions_of(user) for user in (*users, subjects.OPERATOR)]
    used = {subject for user in table for subject in (*user.publish, *user.subscribe)}
    built = {re.sub(rf"({'|'.join(users)})\b", "*", subject) for subject in used}
    return {subject.removeprefix(subjects.PREFIX + ".").replace("*", "<id>") for subject in built}


def test_it_names_enough_to_be_followed() -> None:
    assert len(PLACES) >= 15 and len(SUBJECTS) >= 8


@pytest.mark.parametrize(("file", "name"), PLACES)
def test_every_place_exists(file: str, name: str) -> None:
    assert (ROOT / file).exists() and name in defined_names(ROOT / file)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_subject_exists(subject: str) -> None:
    assert re.sub(r"<[\w ]+>", "<id>", subject) in known_subjects()


def test_it_is_short() -> None:
    prose = re.sub(r"```.*?```", "", DOCUMENT, flags=re.S)
    assert len(prose.split()) <= 600


def test_the_layers_are_those_of_the_imports() -> None:
    """Paste what `python -m bench.house.layers` prints. A box with a plus sign in it is a new circle."""
    assert f"```mermaid\n{layers.mermaid()}\n```" in DOCUMENT


def test_the_diagram_is_the_table() -> None:
    assert f"```mermaid\n{mermaid().strip()}\n```" in DOCUMENT
