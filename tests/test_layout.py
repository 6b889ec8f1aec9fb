"""The tree keeps its shape: tests mirror sources, files stay small, services have the same rooms."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ("services", "shared", "models", "sim", "bench")
FREE = (
    "tests/stack",
    "tests/clients",
    "tests/docs",
    "tests/conformance",
    "tests/readme",
    "tests/test_layout.py",
)
"""Tests of the whole rather than of one file."""
MAX_LINES = 500
SERVICES = ("gateway", "scheduler", "predictor", "placement", "ledger", "worker")


def python_files(folder: str) -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py"))


def logic_lines(path: Path) -> int:
    """Lines inside functions and methods: what a test could exercise."""
    tree = ast.parse((ROOT / path).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return sum((node.end_lineno or node.lineno) - node.lineno for node in functions)


def test_every_test_mirrors_a_source() -> None:
    orphans = []
    for path in python_files("tests"):
        if not path.name.startswith("test_") or str(path).startswith(FREE):
            continue
        inner = path.relative_to("tests").with_name(path.name.removeprefix("test_"))
        candidates = [inner, inner.with_suffix(""), inner.parent / inner.stem / "__init__.py"]
        if not any((ROOT / candidate).exists() for candidate in candidates):
            orphans.append(str(path))
    assert orphans == []


def test_every_source_with_logic_has_a_test() -> None:
    missing = []
    for folder in SOURCES:
        for path in python_files(folder):
            if path.name in ("__init__.py", "__main__.py", "config.py") or logic_lines(path) < 40:
                continue
            test = Path("tests") / path.with_name(f"test_{path.name}")
            of_folder = Path("tests") / path.parent.with_name(f"test_{path.parent.name}.py")
            if not (ROOT / test).exists() and not (ROOT / of_folder).exists():
                missing.append(str(path))
    assert missing == []


def test_no_file_is_too_long() -> None:
    lengths = {
        str(path): len((ROOT / path).read_text().splitlines())
        for folder in (*SOURCES, "tests")
        for path in python_files(folder)
    }
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_has_the_same_rooms(service: str) -> None:
    folder = ROOT / "services" / service
    for name in ("__main__.py", "config.py", "service.py", "README.md"):
        assert (folder / name).exists(), f"services/{service}/{name}"
    assert len((folder / "__main__.py").read_text().splitlines()) <= 30
    assert "HANDLERS" in (folder / "service.py").read_text()


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(path)
        for folder in (*SOURCES, "tests")
        for path in python_files(folder)
        if (ROOT / path).read_text().strip()
        and ast.get_docstring(ast.parse((ROOT / path).read_text())) is None
    ]
    assert silent == []
