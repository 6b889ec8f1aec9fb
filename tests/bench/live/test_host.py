"""A short run of the host bench yields its figures."""

from pathlib import Path

import pytest

from bench.live.host import run
from tests.bench.rig import context_of


@pytest.mark.slow
@pytest.mark.stack
def test_a_short_run_yields_every_figure(tmp_path: Path) -> None:
    words = ("--answers", "16", "--streams", "1", "8", "--output-tokens", "16")
    outcome = run(context_of("host", tmp_path, *words))
    parts = ("gateway", "scheduler", "placement", "predictor")
    wanted = {f"{part}_us_per_token_b{streams}" for part in parts for streams in (1, 8)}
    wanted |= {"thread_us_per_row_b1", "thread_us_per_row_b128_chunk512", "stack_tok_s_b1", "stack_tok_s_b8"}
    assert wanted <= set(outcome.figures) and outcome.failures == 0
    assert 0 < outcome.figures["events_per_token_b8"] <= 1
    assert outcome.figures["thread_us_per_row_b256"] < outcome.figures["thread_us_per_row_b1"]
