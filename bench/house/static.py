"""Figures of the source itself: lines, imports, modules with one importer, names with several meanings.

It reads the working tree below a root and imports nothing of it.
"""

import ast
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

SPLINTER_LINES = 75
"""A module shorter than this with exactly one importer is a splinter."""
_NO_SPLINTERS = {"__init__", "__main__", "config", "service"}
"""Exceptions: entry points, and modules that every service has under this name."""


@dataclass(frozen=True)
class Module:
    """One Python file."""

    name: str
    """Dotted name from the root."""
    path: Path
    text: str

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    def import_lines(self) -> int:
        """Return the lines of import statements."""
        return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in self._imports())

    def imported(self) -> Iterator[str]:
        """Yield dotted names of imports; for `from a import b` both `a` and `a.b`."""
        for node in self._imports():
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif node.module and not node.level:
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    def types(self) -> list[str]:
        """Return the names of public top-level classes and type aliases."""
        found: list[str] = []
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef):
                found.append(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found += [target.id for target in targets if isinstance(target, ast.Name)]
        return [name for name in found if name[0].isupper() and not name.isupper()]

    def _imports(self) -> Iterator[ast.Import | ast.ImportFrom]:
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.Import | ast.ImportFrom))


def modules(root: Path, folders: Sequence[str]) -> list[Module]:
    """Return every Python file below `folders` of `root`, sorted by path."""
    found = [path for folder in folders for path in (root / folder).rglob("*.py")]
    return [_read(root, path) for path in sorted(found)]


def lines(root: Path, folders: Sequence[str]) -> int:
    return sum(module.lines for module in modules(root, folders))


def words(pages: Sequence[Path]) -> int:
    """Return the words in text files, as `wc -w` counts them."""
    return sum(len(page.read_text().split()) for page in pages)


def entries(root: Path) -> int:
    """Return the number of files and folders in the root that git tracks and `ls` shows."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True)
    names = {name.partition("/")[0] for name in listed.stdout.split("\0") if name}
    return len([name for name in names if not name.startswith(".")])


def import_share(of: Sequence[Module]) -> float:
    """Return the share of lines that are import statements."""
    return sum(module.import_lines() for module in of) / sum(module.lines for module in of)


def splinters(of: Sequence[Module]) -> list[Module]:
    """Return modules below `SPLINTER_LINES` lines that exactly one other of them imports."""
    by_name = {module.name: module for module in of}
    importers: dict[str, set[str]] = defaultdict(set)
    for module in of:
        for name in set(module.imported()) & by_name.keys() - {module.name}:
            importers[name].add(module.name)
    return [
        module
        for module in of
        if module.lines < SPLINTER_LINES
        and module.path.stem not in _NO_SPLINTERS
        and len(importers[module.name]) == 1
    ]


def homonyms(of: Sequence[Module]) -> dict[str, list[str]]:
    """Return public types that several modules define, with those modules."""
    where: dict[str, list[str]] = defaultdict(list)
    for module in of:
        for name in set(module.types()):
            where[name].append(module.name)
    return {name: homes for name, homes in sorted(where.items()) if len(homes) > 1}


def _read(root: Path, path: Path) -> Module:
    parts = path.relative_to(root).with_suffix("").parts
    return Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), path, path.read_text())
