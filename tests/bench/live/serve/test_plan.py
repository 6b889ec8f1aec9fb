"""What a run is to do, from its flags."""

from argparse import ArgumentParser
from pathlib import Path

import pytest

from bench.kit.context import Context
from bench.live.serve.bench import add_arguments
from bench.live.serve.plan import Plan, plan_of
from bench.live.serve.sides import kv_tokens_for
from shared.errors import ConfigError

FEW = ["--lessons", "10", "--pool", "10", "--max-tokens", "64"]


def plan(tmp_path: Path, *words: str, quick: bool = False, seed: int = 0) -> Plan:
    parser = ArgumentParser()
    add_arguments(parser)
    return plan_of(Context("serve", quick, seed, tmp_path, parser.parse_args([*FEW, *words])))


def test_the_peer_comes_first_and_quick_has_none(tmp_path: Path) -> None:
    assert plan(tmp_path).sides == ("vllm", "ours_vllm", "kvasir", "oracle")
    assert plan(tmp_path, "--peer", "none", "--oracle", "no").sides == ("ours_vllm", "kvasir")
    quick = plan(tmp_path, quick=True)
    assert quick.sides == ("ours_vllm", "kvasir")
    assert quick.requests < plan(tmp_path).requests
    assert plan(tmp_path, "--peer", "vllm", quick=True).sides == ("vllm", "ours_vllm", "kvasir")


def test_the_kv_is_whole_blocks_for_so_many_mean_requests(tmp_path: Path) -> None:
    made = plan(tmp_path, "--kv-requests", "12")
    assert made.kv_tokens % 32 == 0
    assert made.kv_tokens == pytest.approx(12 * made.prompts.mean_request_tokens, abs=32)
    assert made.context_tokens % 32 == 0
    assert made.context_tokens >= max(map(len, made.prompts.measured)) + 64
    assert plan(tmp_path, "--kv-tokens", "1000").kv_tokens == 1024
    assert kv_tokens_for(1.0, 1) == 32


def test_a_kv_too_small_for_a_request_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="raise --kv-requests"):
        plan(tmp_path, "--kv-tokens", "64")


def test_a_model_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        plan(tmp_path, "--model", str(tmp_path))


def test_a_run_may_go_on_with_more_patience_but_not_with_other_prompts(tmp_path: Path) -> None:
    first = plan(tmp_path).identity()
    for words in (
        ["--budget-s", "5"],
        ["--alternations", "9"],
        ["--tolerance", "0.3"],
        ["--repeats", "3"],
        ["--beyond-requests", "9"],
    ):
        assert plan(tmp_path, *words).identity() == first
    for words in (["--requests", "7"], ["--kv-requests", "20"], ["--predictor", "histogram"]):
        assert plan(tmp_path, *words).identity() != first
    assert plan(tmp_path, seed=1).identity() != first
