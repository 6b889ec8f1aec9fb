"""docs/request-lifecycle.md names only what exists, in at most 600 words; the code draws its pictures."""

import ast
import re
from pathlib import Path

import pytest

from bench.house import layers
from services.scheduler.core.sequence import mermaid
from shared import subjects

ROOT = Path(__file__).parent.parent.parent
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
    assert len(PLACES) >= 15
    assert len(SUBJECTS) >= 8


@pytest.mark.parametrize(("file", "name"), PLACES)
def test_every_place_exists(file: str, name: str) -> None:
    assert (ROOT / file).exists()
    assert name in defined_names(ROOT / file)


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
