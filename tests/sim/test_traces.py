"""Trace formats, and files that are none."""

import json
from pathlib import Path

import pytest

from shared.errors import ConfigError
from sim.traces import TraceRow, read_trace


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_our_own_format(tmp_path: Path) -> None:
    text = "arrival_s,prompt_tokens,output_tokens,predicted_tokens\n5,10,20,30\n6.5,1,2,\n"
    assert read_trace(write(tmp_path, "t.csv", text)) == [
        TraceRow(10, 20, 0.0, 30),
        TraceRow(1, 2, 1.5, None),
    ]


def test_azure_counts_from_its_first_line(tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    text += "2023-11-16 18:15:50.9951690,396,109\n"
    first, second = read_trace(write(tmp_path, "azure.csv", text))
    assert first == TraceRow(374, 44, 0.0)
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-4)


def test_mooncake_is_in_milliseconds(tmp_path: Path) -> None:
    rows = [{"timestamp": at, "input_length": 7, "output_length": 5, "hash_ids": [1]} for at in (1000, 3500)]
    path = write(tmp_path, "m.jsonl", "\n".join(json.dumps(row) for row in rows))
    assert [row.arrival_s for row in read_trace(path)] == [0.0, 2.5]


@pytest.mark.parametrize(
    ("text", "says"),
    [("a,b\n1,2\n", "columns"), ("prompt_tokens,output_tokens\n1,x\n", "cannot be read"), ("", "no request")],
)
def test_what_is_no_trace_is_told(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_trace(write(tmp_path, "t.csv", text))
