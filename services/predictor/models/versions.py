"""Trained versions on disk: one numbered file each, written atomically.

A file holds the network, its training data size and its accuracy. Readers take the newest intact file and
skip damaged ones.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from services.predictor.core.features import BUCKETS, DENSE, HEAD_GRAMS, LONGEST_GRAM
from services.predictor.models.network import HIDDEN, WIDTH, Ensemble
from services.predictor.samples import write_whole
from shared.errors import ConfigError

_NAME = re.compile(r"regressor-(\d{6})\.safetensors")
_LAYOUT = f"{BUCKETS}/{LONGEST_GRAM}/{HEAD_GRAMS}/{DENSE}/{WIDTH}/{HIDDEN}"
"""Layout of features and network; a file with another one cannot be loaded."""


@dataclass(frozen=True)
class Trained:
    """A trained network, its number, and its accuracy when it was made."""

    network: Ensemble
    number: int
    report: Mapping[str, Any]

    @property
    def version(self) -> str:
        return f"regressor-{self.number}"


def paths(directory: Path) -> list[Path]:
    """Return the files of all versions in a directory, newest last."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if _NAME.fullmatch(path.name))


def number_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ConfigError(f"{path.name} is no version; write regressor-NNNNNN.safetensors", param="model")
    return int(match.group(1))


def write(directory: Path, network: Ensemble, report: Mapping[str, Any], *, keep: int = 5) -> Path:
    """Write the next version and remove all but the last `keep`. Returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    there = paths(directory)
    path = directory / f"regressor-{number_of(there[-1]) + 1 if there else 1:06}.safetensors"
    about = {"layout": _LAYOUT, "members": str(len(network.members)), "report": json.dumps(dict(report))}
    data = save({name: tensor.contiguous() for name, tensor in network.state_dict().items()}, about)
    write_whole(path, data)
    for old in paths(directory)[:-keep]:
        old.unlink(missing_ok=True)
    return path


def read(path: Path) -> Trained:
    """Load a version. Raises ConfigError if it is damaged or of another layout."""
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path.name} cannot be read: {error}; train anew", param="model") from error
    if about.get("layout") != _LAYOUT:
        raise ConfigError(f"{path.name} was made by another release; train anew", param="model")
    network = Ensemble(int(about["members"]))
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:
        raise ConfigError(f"{path.name} is incomplete; train anew", param="model") from error
    return Trained(network.eval(), number_of(path), json.loads(about["report"]))


def latest(directory: Path) -> Trained | None:
    """Return the newest version that can be read, or None."""
    for path in reversed(paths(directory)):
        try:
            return read(path)
        except ConfigError:
            continue
    return None
