"""A package with entry points, as pip would have laid it out."""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest


def install(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    source: str,
    group: str,
    points: Mapping[str, str],
) -> None:
    """A distribution of one module of that source. `points`: by name, what in the module each one is."""
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: 1.0\n")
    lines = [f"{name} = {module}:{what}\n" for name, what in points.items()]
    (info / "entry_points.txt").write_text(f"[{group}]\n{''.join(lines)}")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, module, raising=False)
