"""What a checkpoint is, whichever engine computes it: a digest of its configuration and tensors as stored.

Workers of one stack have to serve the same one. Engines name their tensors differently once loaded, so this
is of the files. Reads safetensors' headers itself; knows no model class.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from hashlib import blake2b
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from shared.model_files import read_json, source_of
from shared.tokenizer_files import model_folder

SAYS_NOTHING_OF_KV = frozenset(
    {
        "architectures",  # the class is digested itself
        "bos_token_id",
        "dtype",  # the weights', which may be another than the file's, is in their digest
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Of a configuration, beside what begins with `_` (where it came from). Whatever is not known to be harmless
counts: a difference that changes no KV costs a miss, one that does and is overlooked a wrong answer."""
_LENGTH = struct.Struct("<Q")
_PATTERNS = ("*.safetensors", "pytorch_model*.bin")


def canonical(value: Any) -> Any:
    """A configuration without what says nothing of KV."""
    if isinstance(value, dict):
        kept = ((str(name), each) for name, each in value.items())
        return {
            name: canonical(each)
            for name, each in kept
            if not name.startswith("_") and name not in SAYS_NOTHING_OF_KV
        }
    return [canonical(each) for each in value] if isinstance(value, list | tuple) else value


def checkpoint_digest(model: str, dtype: str) -> str:
    """Of the folder or the hub id, which is there already, and the dtype that it is computed in. In hex.

    Tensors count by name, shape and bytes (CRC-32), not by the files that they are spread over. Raises
    OSError for files that cannot be read.
    """
    folder = _local(model)
    head = json.dumps(canonical(read_json(folder / "config.json")), sort_keys=True)
    digest = blake2b(f"{head}\n{dtype}\n".encode(), digest_size=16)
    for line in sorted(_tensors(folder)):
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()


def stored_dtype(model: str) -> str:
    """What its configuration says that the weights were made in: "float32" where it says nothing.

    Raises ConfigError where there is no such model.
    """
    config = read_json(model_folder(model) / "config.json")
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else {}
    said = (config.get(name) or inner.get(name) for name in ("dtype", "torch_dtype"))
    return next((str(name) for name in said if name), "float32")


def _local(model: str) -> Path:
    source = source_of(model)
    if isinstance(source, Path):
        return source
    from huggingface_hub import snapshot_download  # half a second that a local folder does not need

    wanted = [*_PATTERNS, "config.json"]
    found = snapshot_download(
        source.name, revision=source.revision, allow_patterns=wanted, local_files_only=True
    )
    return Path(found)


def _tensors(folder: Path) -> Iterator[str]:
    files = {pattern: sorted(folder.glob(pattern)) for pattern in _PATTERNS}
    stored = next((found for found in files.values() if found), [])
    for path in stored:
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
