"""Every bench that is listed can be loaded, has its flags, and is documented; and the other way round."""

import argparse
import re

import pytest

from bench.kit.provenance import ROOT
from bench.registry import BENCHES, Bench, find, names

_FRONT = (ROOT / "docs" / "benchmarks.md").read_text()
_PAGES = {page.stem: page.read_text() for page in (ROOT / "docs" / "benchmarks").glob("*.md")}


@pytest.mark.parametrize("bench", BENCHES, ids=names())
def test_it_can_be_loaded_and_has_its_flags(bench: Bench) -> None:
    module = bench.load()
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    assert callable(module.run)


def test_names_are_unique() -> None:
    assert len(set(names())) == len(names())
    with pytest.raises(KeyError):
        find("nothing-of-the-kind")


def test_every_bench_has_a_page_that_the_front_page_leads_to() -> None:
    assert set(_PAGES) == set(names())
    assert set(re.findall(r"\]\(benchmarks/([a-z0-9-]+)\.md\)", _FRONT)) == set(names())
    for name, page in _PAGES.items():
        assert page.startswith(f"# `{name}`\n")
        assert re.search(rf"python -m bench {name}\b", page), f"{name}.md says how to run it"


def test_every_command_in_the_documents_is_a_bench() -> None:
    for text in (_FRONT, *_PAGES.values()):
        commands = set(re.findall(r"python -m bench ([a-z][a-z0-9-]*)", text))
        assert commands - {"data", "record"} <= set(names())


def test_the_front_page_stays_one() -> None:
    """A stranger reads it in two minutes; details are on the benches' pages."""
    assert len(_FRONT.split()) < 1300 and len(_FRONT.splitlines()) < 80
