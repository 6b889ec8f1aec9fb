"""A run's directory, its random numbers and its record."""

import json
from argparse import Namespace
from pathlib import Path

from bench.kit.context import Context
from bench.kit.provenance import ROOT


def make(tmp_path: Path, seed: int = 0, **flags: object) -> Context:
    return Context("name", quick=True, seed=seed, run_dir=tmp_path, arguments=Namespace(**flags))


def test_random_numbers_depend_on_seed_and_purpose_only(tmp_path: Path) -> None:
    first, again = make(tmp_path).random("a"), make(tmp_path).random("a")
    assert first.random() == again.random()
    others = {make(tmp_path, seed).random(purpose).random() for seed in (0, 1) for purpose in ("a", "b")}
    assert len(others) == 4


def test_the_configuration_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    resolved = make(tmp_path, model=ROOT / "models" / "tiny_chat", out=tmp_path / "x").resolved()
    assert (resolved["model"], resolved["out"]) == ("models/tiny_chat", "x")
    assert str(ROOT) not in json.dumps(resolved)
