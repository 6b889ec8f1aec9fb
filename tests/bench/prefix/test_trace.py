"""Traces: read as they were recorded, generated as they are stated."""

import json
import random
from pathlib import Path

import pytest

from bench.prefix.trace import PRESETS, Conversations, generate, infinite_hit_rate, read_mooncake


def test_a_recorded_trace_keeps_what_requests_share(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 0, "hash_ids": [0, 1, 2]}, {"timestamp": 5, "hash_ids": [0, 1, 7]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = read_mooncake(file)
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert infinite_hit_rate([first, second]) == pytest.approx(2 / 6)


@pytest.mark.parametrize("line", ["{}", "no json", '{"hash_ids": [-1]}', '{"hash_ids": 3}'])
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"hash_ids": [1]}\n' + line)
    with pytest.raises(ValueError, match="line 2"):
        read_mooncake(file)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_generated_trace_repeats_with_its_seed(preset: str) -> None:
    first, again, other = (generate(PRESETS[preset], 200, random.Random(seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert len(first) == 200


def test_a_block_has_one_beginning() -> None:
    parents: dict[bytes, bytes | None] = {}
    for chain in generate(PRESETS["chats"], 500, random.Random(3)):
        for index, name in enumerate(chain):
            parent = chain[index - 1] if index else None
            assert parents.setdefault(name, parent) == parent


def test_turns_and_singles_are_as_stated() -> None:
    alone = generate(Conversations(system_prompts=1, single=1.0), 300, random.Random(4))
    assert len({chain[4] for chain in alone}) == 300
    chatty = generate(Conversations(single=0.0, turns=8.0, think=(1.0, 0.1)), 3000, random.Random(4))
    chats = len({chain[4] for chain in chatty})
    assert 3000 / 10 < chats < 3000 / 7


def test_of_nothing_nothing_is_found() -> None:
    assert infinite_hit_rate([]) == 0.0
