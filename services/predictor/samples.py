"""Reads and writes prompts and answer lengths as JSONL: training data and the predictor's own history.

A row has the prompt as `prompt_ids` (token ids) or `prompt` (text, which needs a tokenizer). The answer is
`length` (tokens), `response_ids` or `response` (text); `censored` marks one cut by its limit. Alpaca's
columns (`instruction`, `input`, `output`) are understood too.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.predictor.core.length_model import LengthSample
from shared.errors import ConfigError, InvalidRequest
from shared.messages.sequence import pack_tokens, unpack_tokens


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically: to a temporary name, then renamed over `path`. Raises OSError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a `tokenizer.json`, or the one in a directory. Raises ConfigError."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises nothing more precise
        raise ConfigError(f"{file.name} is no tokenizer: {error}", param="tokenizer") from error


def read_samples(path: Path, tokenizer: Tokenizer | None = None) -> list[LengthSample]:
    """Return all rows in order. Raises ConfigError (no such file), InvalidRequest (names an unusable row)."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name} cannot be read: {error}; name a JSONL file", param="data") from error
    return list(_samples(lines, path.name, tokenizer))


def write_samples(path: Path, samples: Iterable[LengthSample]) -> None:
    """Write samples to a file atomically. Raises OSError."""
    write_whole(path, "".join(row_of(sample) for sample in samples).encode())


def row_of(sample: LengthSample) -> str:
    """Return a sample as one line of JSONL."""
    row: dict[str, Any] = {"prompt_ids": unpack_tokens(sample.prompt), "length": sample.output_tokens}
    if sample.censored:
        row["censored"] = True
    return json.dumps(row) + "\n"


def _samples(lines: Sequence[str], name: str, tokenizer: Tokenizer | None) -> Iterator[LengthSample]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not an object")
            yield LengthSample(_prompt(row, tokenizer), _length(row, tokenizer), bool(row.get("censored")))
        except (ValueError, TypeError, OverflowError, KeyError) as error:
            raise InvalidRequest(
                f"{name}, line {number}: {error}; a row has prompt or prompt_ids, and length or response",
                param="data",
            ) from error


def _prompt(row: dict[str, Any], tokenizer: Tokenizer | None) -> bytes:
    if "prompt_ids" in row:
        return pack_tokens(row["prompt_ids"])
    if "prompt" not in row and "instruction" in row:
        text = str(row["instruction"])
        return pack_tokens(_ids(f"{text}\n{row['input']}" if row.get("input") else text, tokenizer))
    return pack_tokens(_ids(row["prompt"], tokenizer))


def _length(row: dict[str, Any], tokenizer: Tokenizer | None) -> int:
    if "length" in row:
        length = int(row["length"])
    elif "response_ids" in row:
        length = len(row["response_ids"])
    else:
        length = len(_ids(row["response"] if "response" in row else row["output"], tokenizer)) + 1
    if length < 1:
        raise ValueError("an answer has at least one token")
    return length


def _ids(text: Any, tokenizer: Tokenizer | None) -> list[int]:
    if not isinstance(text, str):
        raise ValueError("a text is a string")
    if tokenizer is None:
        raise ValueError("text needs a tokenizer (--tokenizer FILE)")
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids
