"""Every bench that is listed can be loaded, has its flags, and is documented; and the other way round."""

import argparse
import re

import pytest

from bench.kit.provenance import ROOT
from bench.registry import BENCHES, Bench, find, names

_DOCUMENT = (ROOT / "docs" / "benchmarks.md").read_text()


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


def test_documented_is_what_exists() -> None:
    headings = set(re.findall(r"^### `([a-z0-9-]+)`", _DOCUMENT, flags=re.M))
    assert headings == set(names())


def test_every_command_in_the_document_is_a_bench() -> None:
    commands = set(re.findall(r"python -m bench ([a-z][a-z0-9-]*)", _DOCUMENT))
    assert commands - {"data", "record"} <= set(names())
    assert commands >= set(names())
