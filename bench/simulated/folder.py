"""Where data sets lie: `$KVASIR_DATA`, else `../shared/data` beside the repository, else the user's cache."""

import os
from pathlib import Path

from bench.provenance import ROOT


def data_folder() -> Path | None:
    """The first that exists; None where there is none, and workloads are generated then."""
    named = os.environ.get("KVASIR_DATA")
    candidates = [Path(named)] if named else []
    candidates += [ROOT.parent / "shared" / "data", Path.home() / ".cache" / "kvasir" / "data"]
    return next((folder for folder in candidates if folder.is_dir()), None)
