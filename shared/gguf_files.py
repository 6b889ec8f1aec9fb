"""GGUF files, the format of llama.cpp and Ollama. `folder_of` makes a model folder of one, with a link to its
weights; `read_header` checks a file without a large import."""

import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any

from shared.errors import ConfigError

SUFFIX = ".gguf"
WEIGHTS = "weights.gguf"
"""Name of the link in a folder."""
ENV_CACHE = "KVASIR_CACHE"
BLOCKS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
}  # fmt: skip
"""Known types: name, weights in a block, bytes of a block."""
_FORM = b"1"
"""Changes with what a folder holds."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_UNPACK_DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's type, shape in torch's order, and bytes within the file."""

    kind: int
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata and tensors of a file, by name."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def cache_folder() -> Path:
    """Return the folder for what is downloaded or derived: `KVASIR_CACHE`, or `~/.cache/kvasir`."""
    own = os.environ.get(ENV_CACHE)
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvasir"


def is_gguf(model: str) -> bool:
    """Return whether a model's name is that of a GGUF file."""
    return model.endswith(SUFFIX)


def folder_of(model: str) -> Path:
    """Return the model folder of a GGUF file, made on first use, which takes seconds. Raise ConfigError."""
    file = Path(model).expanduser()
    try:
        file = file.resolve(strict=True)
        found = file.stat()
        template = file.with_suffix(".jinja")
        written_ns = template.stat().st_mtime_ns if template.is_file() else 0
    except OSError as error:
        raise ConfigError(f"model {model!r} cannot be read: {error.strerror}", param="model") from None
    key = f"{file}\n{found.st_size} {found.st_mtime_ns} {written_ns}".encode()
    folder = cache_folder() / "gguf" / f"{file.stem}-{blake2b(key, digest_size=6, key=_FORM).hexdigest()}"
    if not (folder / WEIGHTS).exists():
        read_header(file)
        words = [sys.executable, "-m", "shared.gguf_unpack", str(file), str(folder)]
        root = Path(__file__).parent.parent
        try:  # in a process of its own, which frees what the imports take
            done = subprocess.run(
                words, cwd=root, capture_output=True, text=True, timeout=_UNPACK_DEADLINE_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"{file} was not read within {_UNPACK_DEADLINE_S:.0f} s", param="model"
            ) from None
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
            raise ConfigError(said.removeprefix("error: "), param="model")
    return folder


def read_header(file: Path) -> GgufHeader:
    """Return the header. Raise ConfigError for a file that is cut short or has a type that is not known."""
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _Reader(file, data).header()
            wanted, there = (
                max((each.start + each.size for each in header.tensors.values()), default=0),
                len(data),
            )
    except (struct.error, ValueError, OverflowError):  # an empty file, too
        raise ConfigError(
            f"{file} is cut short or damaged: download or copy it again", param="model"
        ) from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", param="model") from None
    if there < wanted:
        text = f"{file} is cut short, {there:,} of {wanted:,} bytes: download or copy it again"
        raise ConfigError(text, param="model")
    return header


class _Reader:
    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self._file, self._data, self._at = file, data, 0

    def header(self) -> GgufHeader:
        if self._data[:4] != b"GGUF":
            raise ConfigError(f"{self._file} is no GGUF file: download it again", param="model")
        self._at = 4
        version, tensors, pairs = self._take("IQQ")
        if version not in (2, 3):
            text = f"{self._file} is of version {version} of GGUF, and 2 and 3 are known: convert it again"
            raise ConfigError(text, param="model")
        metadata = {}
        for _ in range(pairs):
            name = self._string()
            metadata[name] = self._value(self._one("I"))
        found = [self._tensor() for _ in range(tensors)]
        step = metadata.get("general.alignment", 32)
        first = -(-self._at // step) * step
        return GgufHeader(
            metadata,
            {name: GgufTensor(kind, shape, first + at, size) for name, kind, shape, at, size in found},
        )

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int, int]:
        name = self._string()
        shape = self._take(f"{self._one('I')}Q")[::-1]
        kind, at = self._take("IQ")
        if kind not in BLOCKS:
            text = f"{self._file} has weights of type {kind}, which is not known: "
            text += f"take a file of {', '.join(each for each, _, _ in BLOCKS.values())}"
            raise ConfigError(text, param="model")
        _, weights, size = BLOCKS[kind]
        return name, kind, shape, at, prod(shape) // weights * size

    def _take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return found

    def _one(self, form: str) -> Any:
        return self._take(form)[0]

    def _string(self) -> str:
        length = self._one("Q")
        start = self._at
        if start + length > len(self._data):
            raise ValueError("a string ends behind the file")
        self._at += length
        return self._data[start : self._at].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._one(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"a value of type {kind}")
        each, count = self._take("IQ")
        if each in _SCALARS:
            return list(self._take(f"{count}{_SCALARS[each]}"))
        return [self._value(each) for _ in range(count)]
