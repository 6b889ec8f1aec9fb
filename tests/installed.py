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


EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
KINDS = {
    "policy": f"{EXAMPLES}/longest_first.py:LongestFirst",
    "placement": f"{EXAMPLES}/fewest_sequences.py:FewestSequences",
    "predictor": f"{EXAMPLES}/half_of_limit.py:HalfOfLimit",
    "eviction": f"{EXAMPLES}/least_found.py:LeastFound",
}
"""The examples of the docs, by file name."""
_GROUPS = {
    "policy": "kvasir.scheduler.policies",
    "placement": "kvasir.placement.policies",
    "predictor": "kvasir.predictor.models",
    "eviction": "kvasir.worker.evictions",
}


def install_examples(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A distribution for each example; their names, by kind."""
    names = {}
    for kind, example in KINDS.items():
        file, _, what = example.partition(":")
        module, names[kind] = f"installed_{Path(file).stem}", Path(file).stem.replace("_", "-")
        source = Path(file).read_text()
        install(folder, monkeypatch, module, source, _GROUPS[kind], {names[kind]: what})
    return names
