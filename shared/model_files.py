"""Locate a model and check its files without loading it. A model is a folder, a GGUF file, or a hub id, maybe
with a revision (`org/name`, `org/name@0123abc`). Knows the layout of Hugging Face folders and safetensors."""

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePath
from typing import Any

from shared.errors import ConfigError
from shared.gguf_files import WEIGHTS, folder_of, is_gguf

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
"""Limit of the file format."""
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", WEIGHTS)


@dataclass(frozen=True, slots=True)
class HubId:
    """A hub model. Without a revision, it follows the hub's main branch."""

    name: str
    revision: str | None

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}" if self.revision else self.name


def source_of(model: str) -> Path | HubId:
    """Return the folder if it exists, a GGUF file's (`folder_of`), else the hub id. Raise ConfigError if it
    is none of them."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if is_gguf(model):
        return folder_of(model)
    name, at, revision = model.partition("@")
    is_path = model.startswith((".", "/", "~")) or name.count("/") > 1
    parent = folder.parent
    if is_path or (parent != Path() and parent.is_dir()):
        there = sorted(path.parent.name for path in parent.glob("*/config.json"))
        beside = f"; {parent} has {', '.join(there)}" if 0 < len(there) <= 10 else ""
        raise ConfigError(f"model {model!r}: no such folder{beside}", param="model")
    if at and not revision:
        raise ConfigError(f"model {model!r}: write the revision after the @, or leave it out", param="model")
    return HubId(name, revision or None)


def name_of(model: str) -> str:
    """Return the model's name for clients: the last part of the folder or id, or the file's name."""
    if is_gguf(model):
        return PurePath(model).stem
    return PurePath(model if Path(model).expanduser().is_dir() else model.partition("@")[0]).name


def check_model(model: str) -> None:
    """Check that a folder's configuration is readable and its weights are complete. Raise ConfigError."""
    folder = source_of(model)
    if isinstance(folder, HubId):
        return
    config = folder / "config.json"
    if not config.is_file():
        raise ConfigError(f"{folder} holds no model: it has no config.json", param="model")
    read_json(config)
    weights = [path for pattern in _WEIGHTS for path in sorted(folder.glob(pattern))]
    if not weights:
        raise ConfigError(f"{folder} has no weights: no model.safetensors", param="model")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = set(read_json(index).get("weight_map", {}).values())
        missing = sorted(name for name in named if not (folder / str(name)).is_file())
        if missing:
            raise ConfigError(f"{folder} lacks {', '.join(missing)}: download it again", param="model")
    for path in weights:
        if path.suffix == ".safetensors":
            _check_safetensors(path)


def hub_reason(error: Exception) -> str:
    """Return the hub client's reason for a failed download, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.removeprefix("Got: ").partition(" An error happened while")[0]


def parameters_of(folder: Path) -> int:
    """Return the number of weights in a folder's safetensors files."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(_LENGTH.unpack(file.read(_LENGTH.size))[0]))
        count += sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return count


def revision_advice(hub_id: HubId, commit: str | None) -> str | None:
    """Return advice to pin a revision, or None if one is given."""
    if hub_id.revision is not None:
        return None
    now = f"; now it is {commit}: write {hub_id.name}@{commit} to keep it" if commit else ""
    return f"model {hub_id.name} names no revision, so the hub may change it{now}"


def _check_safetensors(path: Path) -> None:
    try:
        with path.open("rb") as file:
            size_bytes = path.stat().st_size
            head = file.read(_LENGTH.size)
            header_bytes = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
            if not 2 <= header_bytes <= _MAX_HEADER_BYTES:
                raise ConfigError(f"{path} is no safetensors file: download it again", param="model")
            header = file.read(header_bytes)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", param="model") from None
    wanted_bytes = _LENGTH.size + header_bytes
    if len(header) == header_bytes:
        wanted_bytes += _data_bytes(path, header)
    if size_bytes < wanted_bytes:
        raise ConfigError(
            f"{path} is cut short, {size_bytes:,} of {wanted_bytes:,} bytes: download or copy it again",
            param="model",
        )


def _data_bytes(path: Path, header: bytes) -> int:
    """Return the data length that a safetensors header declares."""
    try:
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        return max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ConfigError(f"{path} is no safetensors file: download it again", param="model") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty without a file. Raise ConfigError for invalid JSON."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", param="model") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}", param="model") from None
    return content if isinstance(content, dict) else {}
