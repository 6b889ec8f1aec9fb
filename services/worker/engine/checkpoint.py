"""Digest of a checkpoint's configuration, stored tensors and adapters, equal for all kinds of engines.

All workers of a stack must serve the same checkpoint, whatever their engines call the loaded tensors."""

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from services.worker.engine.adapters import NO_ADAPTERS, adapter_config, folder_of
from shared.gguf_files import WEIGHTS
from shared.model_files import read_json, source_of
from shared.tokenizer_files import model_folder

_SAYS_NOTHING_OF_KV = frozenset(
    "architectures bos_token_id dtype eos_token_id id2label initializer_range label2id output_attentions "
    "output_hidden_states pad_token_id problem_type return_dict torch_dtype transformers_version "
    "use_cache".split()
)
"""Configuration keys that do not affect KV, or are in the digest apart, beside those that begin with `_`.

Unknown keys count: a harmless difference costs a cache miss, an overlooked one gives wrong answers."""
_LENGTH = struct.Struct("<Q")
_PATTERNS = ("*.safetensors", "pytorch_model*.bin", WEIGHTS, "adapter_model.bin")


def canonical(value: Any) -> Any:
    """Return a configuration without the keys that do not affect KV."""
    if isinstance(value, dict):
        kept = ((str(name), each) for name, each in value.items())
        return {
            name: canonical(each)
            for name, each in kept
            if not name.startswith("_") and name not in _SAYS_NOTHING_OF_KV
        }
    return [canonical(each) for each in value] if isinstance(value, list | tuple) else value


def checkpoint_digest(model: str, dtype: str, adapters: Mapping[str, str] = NO_ADAPTERS) -> str:
    """Return the hex digest of a local or downloaded model, the dtype that it is computed in, and its LoRA
    adapters (folder by name).

    Tensors count by name, shape, dtype and CRC-32, not by file. Raises OSError for unreadable files."""
    folder = local_folder(model)
    head = json.dumps(canonical(read_json(folder / "config.json")), sort_keys=True)
    digest = blake2b(f"{head}\n{dtype}\n".encode(), digest_size=16)
    for line in sorted(_tensors(folder)):
        digest.update(f"{line}\n".encode())
    for name, path in sorted(adapters.items()):
        told = json.dumps(adapter_config(name, path), sort_keys=True)
        digest.update("\n".join([name, told, *sorted(_tensors(folder_of(path))), ""]).encode())
    return digest.hexdigest()


def stored_dtype(model: str) -> str:
    """Return the weights' dtype from the model's configuration; "float32" if it names none.

    Raises ConfigError if there is no such model."""
    config = read_json(model_folder(model) / "config.json")
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else {}
    said = (config.get(name) or inner.get(name) for name in ("dtype", "torch_dtype"))
    return next((str(name) for name in said if name), "float32")


def local_folder(model: str) -> Path:
    """Return the folder of a local or downloaded model. Raises OSError if it is not downloaded."""
    source = source_of(model)
    if isinstance(source, Path):
        return source
    from huggingface_hub import snapshot_download  # the import takes half a second

    wanted = [*_PATTERNS, "config.json"]
    return Path(
        snapshot_download(source.name, revision=source.revision, allow_patterns=wanted, local_files_only=True)
    )


def _tensors(folder: Path) -> Iterator[str]:
    for path in next(filter(None, (sorted(folder.glob(pattern)) for pattern in _PATTERNS)), []):
        with (
            path.open("rb") as file,
            mmap(file.fileno(), 0, access=ACCESS_READ) as data,
            memoryview(data) as view,
        ):
            if path.suffix != ".safetensors":
                yield f"{path.name} {zlib.crc32(view)}"
                continue
            first = _LENGTH.size + _LENGTH.unpack(view[: _LENGTH.size])[0]
            for name, entry in json.loads(bytes(view[_LENGTH.size : first])).items():
                if name != "__metadata__":
                    start, end = entry["data_offsets"]
                    crc = zlib.crc32(view[first + start : first + end])
                    yield f"{name} {entry['shape']} {entry['dtype']} {crc}"
