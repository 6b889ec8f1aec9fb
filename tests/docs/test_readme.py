"""The README names only targets, folders, links and settings that exist; its tree is the tree."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from shared.config import load

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
TARGETS = sorted(set(re.findall(r"`?make ([a-z-]+)", README)) - {"and"})
LINKS = sorted(set(re.findall(r"\]\((?!http|#)([^)#]+)", README)))


@pytest.mark.parametrize("target", TARGETS)
def test_every_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.M)


@pytest.mark.parametrize("link", LINKS)
def test_every_link_leads_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


def test_the_tree_is_the_tree() -> None:
    tree = README.split("## Where things are")[1].split("```")[1]
    listed = {match.rstrip("/") for match in re.findall(r"^\s*([\w./-]+/)\s", tree, flags=re.M)}
    services = {path.name for path in (ROOT / "services").iterdir() if (path / "__init__.py").exists()}
    roots = {path.parent.name for path in ROOT.glob("*/__init__.py")} | {"docs"}
    assert services | roots <= listed
    for name in listed - services:
        assert (ROOT / name).is_dir()


def test_the_settings_exist_and_take_these_values() -> None:
    named = re.findall(r"--set (\w+)\.([\w.]+)=([\w.]+)", README)
    assert named
    for section, setting, value in named:
        config_type = getattr(import_module(f"services.{section}.config"), f"{section.capitalize()}Config")
        variable = f"KVASIR_{section}__{setting.replace('.', '__')}".upper()
        load(config_type, section, [], {variable: value}).check()
