"""Rows of prompts and lengths, read and written atomically."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.predictor.core.length_model import LengthSample
from services.predictor.samples import load_tokenizer, read_samples, write_samples, write_whole
from shared.errors import ConfigError, InvalidRequest
from shared.messages.sequence import pack_tokens, unpack_tokens

TINY_CHAT = Path(__file__).parents[3] / "models" / "tiny_chat"


def file_of(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    samples = [
        LengthSample(pack_tokens([1, 2, 70_000]), 9, censored=False),
        LengthSample(pack_tokens([]), 300, censored=True),
    ]
    write_samples(tmp_path / "a.jsonl", samples)
    assert read_samples(tmp_path / "a.jsonl") == samples


def test_text_is_tokenized_and_answers_count_their_end(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(TINY_CHAT)
    path = file_of(
        tmp_path,
        {"prompt": "Tell me a story.", "length": 50},
        {"prompt": "Tell me a story.", "response": "Once upon a time."},
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        "",
        {"prompt_ids": [5], "response_ids": [1, 2, 3]},
    )
    text, answered, alpaca, ids = read_samples(path, tokenizer)
    assert tokenizer.decode(unpack_tokens(text.prompt)) == "Tell me a story." and text.output_tokens == 50
    assert (
        answered.output_tokens == len(tokenizer.encode("Once upon a time.", add_special_tokens=False).ids) + 1
    )
    assert tokenizer.decode(unpack_tokens(alpaca.prompt)) == "Add.\n1 2"
    assert ids.output_tokens == 3


@pytest.mark.parametrize(
    "row",
    [
        "no JSON",
        [1],
        {"length": 3},
        {"prompt": "text without a tokenizer", "length": 3},
        {"prompt_ids": [1], "length": 0},
        {"prompt_ids": [-1], "length": 3},
        {"prompt_ids": [1]},
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path: Path, row: Any) -> None:
    path = file_of(tmp_path, {"prompt_ids": [1], "length": 3}, row)
    with pytest.raises(InvalidRequest, match=r"rows\.jsonl, line 2"):
        read_samples(path)


def test_files_that_are_not_there_are_configuration_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none"):
        read_samples(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="no tokenizer"):
        load_tokenizer(tmp_path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_whole(path, b"none")
    write_whole(path, b"one")
    with pytest.raises(TypeError):
        write_whole(path, "no bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]
