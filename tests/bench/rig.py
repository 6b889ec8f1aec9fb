"""A bench as its command makes one: by name, with its own flags."""

from argparse import ArgumentParser
from pathlib import Path

from bench.kit.context import Context
from bench.registry import BENCHES


def context_of(name: str, folder: Path, *words: str, quick: bool = True, seed: int = 0) -> Context:
    """What `python -m bench NAME WORDS` gives the bench, with `folder` as its run directory."""
    (bench,) = (one for one in BENCHES if one.name == name)
    parser = ArgumentParser()
    bench.load().add_arguments(parser)
    return Context(name, quick, seed, folder, parser.parse_args(words))
