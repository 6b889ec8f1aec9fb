"""The live part's cells, workloads and arithmetic; and a small whole run."""

import random
from pathlib import Path

import pytest

from bench.kit.load import Answer, LoadResult
from bench.kit.models import TINY_CHAT
from bench.live.prefix import bench, live
from bench.live.prefix.live import NONE, TIERS, TierCell, block_bytes
from bench.live.prefix.workloads import QUICK, Talked, Templates, requests_of
from tests.bench.rig import context_of


def served(elapsed_s: float, cached: int = 0, error: str = "") -> LoadResult:
    answers = [
        Answer(0.0, [0.1], 1.0, completion_tokens=10, prompt_tokens=90, cached_tokens=cached, error=error)
        for _ in range(4)
    ]
    return LoadResult(answers, elapsed_s)


def test_tiers_are_as_large_as_the_paper_says(tmp_path: Path) -> None:
    shape, size = Templates(), block_bytes(TINY_CHAT)
    assert size == 8 * 2 * 2 * 64 * 16 * 4
    settings = TierCell(TIERS[-1], "fpf", prefetch=False).settings(shape, size, tmp_path)
    assert settings["worker.prefix_cache.host_blocks"] == 32 * 25
    disk_mb = settings["worker.prefix_cache.disk_mb"]
    assert isinstance(disk_mb, int) and 0 <= disk_mb * 2**20 - 128 * 25 * size < 2 * 2**20 + size
    assert settings["worker.prefix_cache.lookahead_sequences"] == 0
    assert settings["placement.order"] == "fpf"
    assert "worker.prefix_cache.disk_mb" not in TierCell(TIERS[1]).settings(shape, size, tmp_path)


def test_requests_share_their_prefix_and_nothing_else() -> None:
    made = requests_of(QUICK, 4096, random.Random(1))
    assert len(made.first) == QUICK.prefixes and len(made.measured) == QUICK.requests
    known = {tuple(body["prompt"][: QUICK.prefix_tokens]) for body in made.first}
    assert len(known) == QUICK.prefixes
    assert {tuple(body["prompt"][: QUICK.prefix_tokens]) for body in made.measured} <= known
    whole = {tuple(body["prompt"]) for body in made.first + made.measured}
    assert len(whole) == QUICK.prefixes + QUICK.requests


def test_text_is_compared_with_the_median_without_a_cache(tmp_path: Path) -> None:
    measured = [live.Measured(TierCell(NONE), served(seconds), {}) for seconds in (4.0, 2.0, 2.0)]
    measured.append(live.Measured(TierCell(TIERS[-1]), served(0.5, 45), {"device": 3}))
    outcome = live._text_outcome(context_of("prefix", tmp_path, "--no-simulated"), measured)
    assert outcome.figures["text_throughput_vs_none"] == pytest.approx(4.0)
    assert outcome.failures == 0
    assert (tmp_path / "text_analysis.png").stat().st_size > 1000


def test_chats_are_compared_side_by_side() -> None:
    talks = {"without": [Talked(served(2.0), 0.4)], "with": [Talked(served(1.0, 30, "x"), 0.1)]}
    outcome = live._chat_outcome(talks)
    assert outcome.figures["chat_throughput_vs_none"] == pytest.approx(2.0)
    assert outcome.figures["chat_later_ttft_vs_none"] == pytest.approx(0.25)
    assert outcome.figures["chat_cached_share"] == pytest.approx(30 / 90)
    assert outcome.failures == 4


@pytest.mark.slow
def test_a_quick_live_run(tmp_path: Path) -> None:
    outcome = bench.run(context_of("prefix", tmp_path, "--no-simulated"))
    assert outcome.failures == 0
    assert outcome.figures["text_throughput_vs_none"] > 1.0
    assert outcome.figures["chat_cached_share"] > 0.3
    assert (tmp_path / "text_analysis.png").exists()
    assert not (tmp_path / "kv").exists()
