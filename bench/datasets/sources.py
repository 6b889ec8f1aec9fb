"""Data files by name: found in the folders where they may be, checked by their SHA-256.

`sources.tsv` lists them. Looked for in `$KVASIR_DATA`, then `../shared/data` beside the repository, then the
user's cache. Every bench works without any of them; this only finds what is there.
"""

import csv
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.provenance import ROOT

_TABLE = Path(__file__).with_name("sources.tsv")


@dataclass(frozen=True)
class Source:
    """One file."""

    path: str
    """Below the data folder, as `azure/AzureLLMInferenceTrace_conv.csv`."""
    bytes: int
    sha256: str
    licence: str
    upstream: str
    url: str
    """Of the same bytes, where upstream has them as one file; else empty."""


def sources() -> list[Source]:
    """All files there are."""
    with _TABLE.open(newline="") as table:
        return [
            Source(
                row["path"],
                int(row["bytes"]),
                row["sha256"],
                row["licence"],
                row["upstream"],
                row["url"],
            )
            for row in csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE)
        ]


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where downloads go."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvasir" / "data"


def folders(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Where data may be, best first."""
    own = [Path(environ["KVASIR_DATA"])] if environ.get("KVASIR_DATA") else []
    return [*own, ROOT.parent / "shared" / "data", cache_folder(environ)]


def find(path: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The first file of that name in the data folders; None: generate the workload instead."""
    for folder in folders(environ):
        if (folder / path).is_file():
            return folder / path
    return None


def sha256_of(file: Path) -> str:
    """In hex."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def state_of(source: Source, environ: Mapping[str, str] = os.environ) -> str:
    """`present`, `differs` (another content under its name) or `missing`."""
    file = find(source.path, environ)
    if file is None:
        return "missing"
    return "present" if sha256_of(file) == source.sha256 else "differs"
