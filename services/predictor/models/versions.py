"""Trained versions on disk: one file each, numbered, written whole or not at all.

A file holds the network and, beside it, what it was trained on and how good it was. Reading takes the newest
that is whole: one that was damaged is passed over. Knows no learner and no bus.
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
"""Of features and network: a file with another one cannot be used."""


@dataclass(frozen=True)
class Trained:
    """A trained network, its number, and how good it was when it was made."""

    network: Ensemble
    number: int
    report: Mapping[str, Any]

    @property
    def version(self) -> str:
        return f"regressor-{self.number}"


def paths(directory: Path) -> list[Path]:
    """Of all versions there, the newest last."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if _NAME.fullmatch(path.name))


def number_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ConfigError(f"{path.name} is no version; write regressor-NNNNNN.safetensors", param="model")
    return int(match.group(1))


def write(directory: Path, network: Ensemble, report: Mapping[str, Any], *, keep: int = 5) -> Path:
    """The next version. All but the last `keep` are removed."""
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
    """Raises ConfigError for a file that is damaged or of another layout."""
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
    """The newest that can be read."""
    for path in reversed(paths(directory)):
        try:
            return read(path)
        except ConfigError:
            continue
    return None
