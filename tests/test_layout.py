"""The tree keeps its shape: sources have tests, files stay small, services have the same rooms."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ("services", "shared", "models", "sim", "bench")
MAX_LINES = 500
SERVICES = ("gateway", "scheduler", "predictor", "placement", "ledger", "worker")


def python_files(folder: str) -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py"))


def logic_lines(path: Path) -> int:
    """Lines inside functions and methods: what a test could exercise."""
    tree = ast.parse((ROOT / path).read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return sum((node.end_lineno or node.lineno) - node.lineno for node in functions)


def imported_by(path: Path) -> set[str]:
    """Dotted names; of `from a import b` both `a` and `a.b`."""
    return {
        name
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.ImportFrom) and node.module
        for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    }


def dotted(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def test_every_source_with_logic_is_within_reach_of_a_test() -> None:
    """A test imports it, or something not more than two imports away from it; what is run by name has no
    importer. Which test that is, imports say: a test file has an idea, not a source."""
    sources = [path for folder in ("services", "shared", "sim", "models") for path in python_files(folder)]
    reached = set().union(*(imported_by(path) for path in python_files("tests")))
    for _ in range(2):
        reached |= {name for path in sources if dotted(path) in reached for name in imported_by(path)}
    missing = [
        str(path)
        for path in sources
        if path.name not in ("__init__.py", "__main__.py", "config.py")
        and logic_lines(path) >= 40
        and dotted(path) not in reached
        and "__main__" not in (ROOT / path).read_text()
    ]
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


def test_no_module_imports_itself() -> None:
    """What is imported late, because it takes long, stays in a file of its own: merged into who imports it
    late, it would come with the first line."""
    own = [
        str(path)
        for folder in (*SOURCES, "tests")
        for path in python_files(folder)
        if path.name != "__init__.py" and dotted(path) in imported_by(path)
    ]
    assert own == []
