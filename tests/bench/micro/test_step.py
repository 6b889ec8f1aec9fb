"""The step bench runs on a real engine and says what it timed."""

from pathlib import Path

import torch

from bench.micro.host_steps import host_ms, split_ms
from bench.micro.step import decode_rows, run
from services.worker.engine.loading import load
from shared.messages.sequence import Sampling
from tests.bench.rig import context_of
from tests.stack.running import TINY_CHAT


def test_rows_are_single_tokens_in_blocks_of_their_own() -> None:
    rows = decode_rows(3, 20, Sampling(seed=0, max_tokens=1))
    assert [len(row.tokens) for row in rows] == [1, 1, 1]
    assert [list(row.blocks) for row in rows] == [[0, 1], [2, 3], [4, 5]]
    assert {row.first_position for row in rows} == {20}


def test_a_step_is_longer_than_its_forward_pass(tmp_path: Path) -> None:
    outcome = run(context_of("step", tmp_path, "--batches", "1", "3", "--contexts", "20"))
    for batch in (1, 3):
        forward_ms = outcome.figures[f"forward_ms_b{batch}_c20"]
        assert 0 < forward_ms < outcome.figures[f"step_ms_b{batch}_c20"]
    assert [list(row)[:2] for row in outcome.tables[0].rows] == [[1, 20], [3, 20]]
    assert not outcome.tables[1].rows, "batches of 64 are beyond these"
    assert all(outcome.figures[f"split_ms_{batch}"] > 0 for batch in (64, 256))


def test_a_step_around_the_model_takes_longer_for_more_sequences() -> None:
    """Sequences cross the borders of blocks meanwhile, and every row has its token."""
    torch.set_num_threads(1)
    model = load(str(TINY_CHAT), dtype="float32", device="cpu")
    few, many = (host_ms(model, batch, 40, 16, 20) for batch in (2, 64))
    assert 0 < few < many


def test_a_step_is_cut_for_any_number_of_borrowers() -> None:
    assert all(split_ms(4, 40, 16, borrowers, 2, 2) > 0 for borrowers in (0, 1, 4))
