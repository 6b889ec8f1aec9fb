"""`python -m bench data`: lists every data file, and downloads what is missing where there is a network."""

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby

from rich.console import Console

from bench.datasets.download import download
from bench.datasets.sources import Source, cache_folder, folders, sources, state_of
from bench.outcome import as_json
from shared.errors import KvasirError, UnavailableError


def main(argv: Sequence[str]) -> int:
    """The exit code: 0, also when something is missing; 1 when a file is not what it should be."""
    parser = argparse.ArgumentParser(prog="python -m bench data", description=__doc__)
    parser.add_argument("--list", action="store_true", help="list only, download nothing")
    parser.add_argument("--json", action="store_true", help="for programs")
    arguments = parser.parse_args(argv)
    states = {source: state_of(source) for source in sources()}
    problems: list[str] = []
    if not arguments.list:
        problems = _download_missing(states)
    if arguments.json:
        sys.stdout.write(as_json({"sets": [{**vars(one), "state": state} for one, state in states.items()]}))
    else:
        _print(states)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if "differs" in states.values() else 0


def _download_missing(states: dict[Source, str]) -> list[str]:
    """Changes `states`; what went wrong, in words. After the first failure to connect it asks no more."""
    for source, state in states.items():
        if state != "missing" or not source.url:
            continue
        try:
            download(source, cache_folder())
            states[source] = "downloaded"
        except UnavailableError as error:
            return [f"downloads ended: {error}"]
        except KvasirError as error:
            return [str(error)]
    return []


def _print(states: dict[Source, str]) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for (upstream, licence), group in groupby(states, lambda one: (one.upstream, one.licence)):
        console.print(f"{upstream}  [{licence}]")
        for source in group:
            console.print(f"  {states[source]:10} {source.sha256}  {source.path}")
    console.print("looked in: " + ", ".join(str(folder) for folder in folders()))
    by_hand = sum(state == "missing" and not source.url for source, state in states.items())
    if by_hand:
        console.print(f"{by_hand} are no single file upstream: make them as the upstream column says")
