"""Read traces: lengths and, if present, arrivals. The column names determine the format.

CSV: `arrival_s,prompt_tokens,output_tokens[,predicted_tokens]` (our own), Azure's
`TIMESTAMP,ContextTokens,GeneratedTokens`, `num_prefill_tokens,num_decode_tokens` (Vidur, Sarathi),
`in_llama,out_llama` (Alpaca lengths), `output_token_length,predicted_length` (LMSYS-Chat-1M answers with the
class that a language model predicted; no prompts). JSONL: `timestamp,input_length,output_length[,hash_ids]`
(Mooncake, milliseconds, with named prompt blocks). A folder of texts is cut into chunks, as papers/003 §2.1
does with BookCorpus.
"""

import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from shared.blocks import HASH_BYTES, BlockHash
from shared.errors import ConfigError

BLOCK_TOKENS = 512
"""Block size in Mooncake's traces."""
CHARACTERS_PER_TOKEN = 4.0
"""Approximate value for English prose with the vocabularies of 2022."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request. `arrival_s` counts from the first row; None if the trace has only lengths."""

    prompt_tokens: int
    output_tokens: int
    arrival_s: float | None = None
    predicted_tokens: int | None = None
    """Predicted tokens, or the number of a class of lengths."""
    names: tuple[BlockHash, ...] = ()
    """Names of the prompt's whole blocks of `BLOCK_TOKENS`, if the trace has them."""


RequestRow = Mapping[str, Any]


def _ours(row: RequestRow) -> TraceRow:
    predicted = row.get("predicted_tokens") or None
    return TraceRow(
        int(row["prompt_tokens"]),
        int(row["output_tokens"]),
        float(row["arrival_s"]) if row.get("arrival_s") not in (None, "") else None,
        int(predicted) if predicted is not None else None,
    )


def _azure(row: RequestRow) -> TraceRow:
    at = datetime.fromisoformat(str(row["TIMESTAMP"])[:26] + "+00:00")
    return TraceRow(int(row["ContextTokens"]), int(row["GeneratedTokens"]), at.timestamp())


def _vidur(row: RequestRow) -> TraceRow:
    return TraceRow(int(float(row["num_prefill_tokens"])), int(float(row["num_decode_tokens"])))


def _alpaca(row: RequestRow) -> TraceRow:
    return TraceRow(int(row["in_llama"]), int(row["out_llama"]))


def _classes(row: RequestRow) -> TraceRow:
    """Parse a row without a prompt length; 1 is a placeholder."""
    return TraceRow(1, int(row["output_token_length"]), predicted_tokens=int(row["predicted_length"]))


def _mooncake(row: RequestRow) -> TraceRow:
    tokens = int(row["input_length"])
    whole = list(row.get("hash_ids") or ())[: tokens // BLOCK_TOKENS]
    names = tuple(int(name).to_bytes(HASH_BYTES, "big") for name in whole)
    return TraceRow(tokens, int(row["output_length"]), float(row["timestamp"]) / 1000.0, names=names)


FORMATS: dict[str, tuple[set[str], Callable[[RequestRow], TraceRow]]] = {
    "kvasir": ({"prompt_tokens", "output_tokens"}, _ours),
    "azure": ({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}, _azure),
    "vidur": ({"num_prefill_tokens", "num_decode_tokens"}, _vidur),
    "alpaca": ({"in_llama", "out_llama"}, _alpaca),
    "classes": ({"output_token_length", "predicted_length"}, _classes),
    "mooncake": ({"timestamp", "input_length", "output_length"}, _mooncake),
}


def read_trace(path: Path) -> list[TraceRow]:
    """Return all usable rows of `path` in order, with arrivals counted from the first. Raises ConfigError."""
    if path.is_dir():
        return chunk_texts(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            rows: Iterable[RequestRow]
            is_csv = path.suffix.lower() == ".csv"
            rows = csv.DictReader(lines) if is_csv else (json.loads(line) for line in lines if line.strip())
            return _from_first_arrival(_parse(rows, path.name))
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be read: {error.strerror}", param="trace") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"trace {path.name} has a line that cannot be read: {error!r}", param="trace"
        ) from error


def _parse(rows: Iterable[RequestRow], name: str) -> list[TraceRow]:
    parse: Callable[[RequestRow], TraceRow] | None = None
    found = []
    for row in rows:
        if parse is None:
            columns = {str(column) for column in row}
            parse = next((made for needed, made in FORMATS.values() if needed <= columns), None)
            if parse is None:
                known = "; ".join(",".join(sorted(needed)) for needed, _ in FORMATS.values())
                raise ConfigError(
                    f"trace {name}: columns {sorted(columns)}; write one of: {known}", param="trace"
                )
        found.append(parse(row))
    usable = [row for row in found if row.prompt_tokens >= 1 and row.output_tokens >= 1]
    if not usable:
        raise ConfigError(f"trace {name} has no request with a prompt and an answer", param="trace")
    return usable


def _from_first_arrival(rows: list[TraceRow]) -> list[TraceRow]:
    arrivals = [row.arrival_s for row in rows if row.arrival_s is not None]
    if len(arrivals) < len(rows):
        return [replace(row, arrival_s=None) for row in rows]
    first_s = min(arrivals)
    return [replace(row, arrival_s=at_s - first_s) for row, at_s in zip(rows, arrivals, strict=True)]


def chunk_texts(folder: Path, chunk_tokens: int = 2048, least_tokens: int = 18) -> list[TraceRow]:
    """Return prompts of up to `chunk_tokens` from every chapter in `folder`. The answer length 1 is a
    placeholder."""
    lengths: list[int] = []
    for path in sorted(folder.glob("*.txt")):
        text = path.read_text(encoding="utf-8", errors="replace")
        for chapter in re.split(r"\n\s*(?=(?:CHAPTER|Chapter|BOOK|PART) )", text):
            tokens = int(len(chapter) / CHARACTERS_PER_TOKEN)
            lengths += [chunk_tokens] * (tokens // chunk_tokens)
            lengths += [tokens % chunk_tokens] if tokens % chunk_tokens >= least_tokens else []
    if not lengths:
        raise ConfigError(f"{folder} has no text", param="trace")
    return [TraceRow(tokens, 1) for tokens in lengths]
