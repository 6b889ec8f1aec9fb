"""Data files by name: found in the data folders, checked by SHA-256, or downloaded.

`datasets.tsv` lists them. The folders are `$KVASIR_DATA`, then `../shared/data` beside the repository, then
the user's cache. No bench needs the files; `python -m bench data` downloads missing ones.
"""

import csv
import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import httpx
from rich.console import Console

from bench.kit.outcome import as_json
from bench.kit.provenance import ROOT
from shared.command_line import Parser
from shared.errors import InternalError, KvasirError, UnavailableError

_CONNECT_S, _DEADLINE_S = 5.0, 60.0
_MOST_EXTRA_BYTES = 1 << 20
_TABLE = Path(__file__).with_name("datasets.tsv")


@dataclass(frozen=True)
class Source:
    """One file."""

    path: str
    """Path below the data folder, such as `azure/AzureLLMInferenceTrace_conv.csv`."""
    bytes: int
    sha256: str
    licence: str
    upstream: str
    url: str
    """URL of the same bytes; empty if upstream does not have them as one file."""


def sources() -> list[Source]:
    """Return all known files."""
    with _TABLE.open(newline="") as table:
        return [
            Source(row["path"], int(row["bytes"]), row["sha256"], row["licence"], row["upstream"], row["url"])
            for row in csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE)
        ]


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for downloads."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvasir" / "data"


def folders(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the folders to search for data, best first."""
    own = [Path(environ["KVASIR_DATA"])] if environ.get("KVASIR_DATA") else []
    return [*own, ROOT.parent / "shared" / "data", cache_folder(environ)]


def find(path: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the first file of that name in the data folders, or None to generate the workload."""
    for folder in folders(environ):
        if (folder / path).is_file():
            return folder / path
    return None


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file in hex."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def state_of(source: Source, environ: Mapping[str, str] = os.environ) -> str:
    """Return `present`, `differs` (unexpected content) or `missing`."""
    file = find(source.path, environ)
    if file is None:
        return "missing"
    return "present" if sha256_of(file) == source.sha256 else "differs"


def download(source: Source, cache: Path, transport: httpx.BaseTransport | None = None) -> Path:
    """Download a file and return its path. Raises UnavailableError without a network, InternalError for
    other content."""
    target = cache / source.path
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(target.suffix + ".part")
    try:
        digest = _fetch(source, part, transport)
        if digest != source.sha256:
            raise InternalError(f"{source.url} has changed: its SHA-256 is {digest}")
        part.replace(target)
    except (httpx.HTTPError, OSError) as error:
        raise UnavailableError(f"{source.url}: {error}") from error
    finally:
        part.unlink(missing_ok=True)
    return target


def _fetch(source: Source, part: Path, transport: httpx.BaseTransport | None) -> str:
    digest, size = hashlib.sha256(), 0
    timeout = httpx.Timeout(_DEADLINE_S, connect=_CONNECT_S)
    with (
        httpx.Client(timeout=timeout, follow_redirects=True, transport=transport) as client,
        client.stream("GET", source.url) as response,
        part.open("wb") as out,
    ):
        response.raise_for_status()
        for piece in response.iter_bytes():
            size += len(piece)
            if size > source.bytes + _MOST_EXTRA_BYTES:
                raise InternalError(f"{source.url} is longer than the {source.bytes} bytes it should have")
            digest.update(piece)
            out.write(piece)
    return digest.hexdigest()


def main(argv: Sequence[str]) -> int:
    """Run the command line. Returns 1 if a file has unexpected content, else 0."""
    parser = Parser(prog="python -m bench data", description=__doc__)
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
    """Download missing files, update `states`, and return error messages. Stops at the first failure."""
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


def data_folder() -> Path | None:
    """Return the first data folder that exists, or None."""
    return next((folder for folder in folders() if folder.is_dir()), None)
