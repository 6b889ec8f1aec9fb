"""The step bench runs on a real engine and says what it timed."""

from argparse import ArgumentParser
from pathlib import Path

from bench.kit.context import Context
from bench.micro.step import add_arguments, decode_rows, run
from shared.messages.sequence import Sampling


def test_rows_are_single_tokens_in_blocks_of_their_own() -> None:
    rows = decode_rows(3, 20, Sampling(seed=0, max_tokens=1))
    assert [len(row.tokens) for row in rows] == [1, 1, 1]
    assert [list(row.blocks) for row in rows] == [[0, 1], [2, 3], [4, 5]]
    assert {row.first_position for row in rows} == {20}


def test_a_step_is_longer_than_its_forward_pass(tmp_path: Path) -> None:
    parser = ArgumentParser()
    add_arguments(parser)
    flags = parser.parse_args(["--batches", "1", "3", "--contexts", "20"])
    outcome = run(Context("step", True, 0, tmp_path, flags))
    for batch in (1, 3):
        forward_ms = outcome.figures[f"forward_ms_b{batch}_c20"]
        assert 0 < forward_ms < outcome.figures[f"step_ms_b{batch}_c20"]
    assert [list(row)[:2] for row in outcome.tables[0].rows] == [[1, 20], [3, 20]]
