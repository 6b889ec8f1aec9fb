"""The engine bench as a command: what it plans and refuses, and short runs against peers."""

import itertools
import json
import random
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import cli
from bench.kit.context import CELLS_FILE, Context
from bench.kit.context import read_cells as rows_of
from bench.kit.cores import Cores, pin
from bench.kit.load import run_batch
from bench.kit.models import TINY_CHAT, vocabulary
from bench.kit.provenance import ROOT
from bench.kit.stacks import Server
from bench.live.engine.bench import add_arguments
from bench.live.engine.duel import BatchCell, Duel, bodies, cells, measure, missing, run_turns, warm
from bench.live.engine.figures import figures, table
from bench.live.engine.sides import Setup, gguf, llamacpp_binary, start_kvasir
from shared.errors import ConfigError

SHORT = "--batches 1,2 --contexts 20 --output-tokens 4 --alternations 2 --kv-gib 1".split()


def engine(run_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: a bench binds itself to a core."""
    argv = [sys.executable, "-m", "bench", "engine", *SHORT, "--out", str(run_dir), *words]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=380, check=False)


def result(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "result.json").read_text()))


def test_a_peer_that_is_not_set_up_says_how_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.live.engine.sides._VENV", tmp_path / "bin")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="make setup-llamacpp"):
        llamacpp_binary()
    monkeypatch.setattr("bench.live.engine.sides.CACHE", tmp_path)
    with pytest.raises(ConfigError, match="make setup-llamacpp"):
        gguf(tmp_path / "model")


def test_types_of_llama_cpp_are_for_it_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["engine", "--out", str(tmp_path), "--type", "Q8_0"]) == 2
    assert "--type are for --peer llamacpp" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not (ROOT / ".venv-llamacpp" / "bin").exists(), reason="make setup-llamacpp")
def test_against_llamacpp_with_weights_of_its_making(tmp_path: Path) -> None:
    done = engine(tmp_path, "--peer", "llamacpp", "--type", "Q8_0")
    assert done.returncode == 0, done.stderr
    assert result(tmp_path)["failures"] == 0


@pytest.mark.parametrize("wrong", ["0", "1,x", ""])
def test_wrong_numbers_are_refused(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(["engine", "--out", str(tmp_path), "--batches", wrong])


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not (ROOT / ".venv-vllm" / ".installed").exists(), reason="make setup-vllm")
def test_against_vllm(tmp_path: Path) -> None:
    done = engine(tmp_path, "--peer", "vllm", "--vllm", "eager-uni")
    assert done.returncode == 0, done.stderr
    made = result(tmp_path)
    assert (made["incomplete"], made["failures"]) == (0, 0) and made["figures"]["tok_s_b2_ctx20_vllm"] > 0
    assert made["figures"]["client_share_max"] < 0.5


CELLS = cells([100], [1, 8], 4)
PLAN = [(turn, cell) for turn in range(2) for cell in CELLS]


class Recording(Duel):
    """Records that a turn was taken."""

    def turn(self, cell: BatchCell, alternation: int) -> Any:
        for side in ("kvasir", "vllm"):
            self.context.record({"alternation": alternation, "cell": cell.name, "side": side}, CELLS_FILE)


def make(tmp_path: Path) -> Recording:
    context = Context("engine", quick=True, seed=0, run_dir=tmp_path, arguments=Namespace())
    return Recording(context, [], Cores(0, 1), 100)


def test_turns_end_within_the_budget_and_the_rest_is_done_by_the_next_run(tmp_path: Path) -> None:
    duel = make(tmp_path)
    clock = itertools.count()
    left = run_turns(duel, PLAN, budget_s=6, now_s=lambda: float(next(clock)))
    done = len(rows_of(tmp_path)) // 2
    assert 0 < done < len(PLAN) and left == len(PLAN) - done
    todo = missing(PLAN, rows_of(tmp_path))
    assert todo == PLAN[done:] and run_turns(duel, todo, budget_s=100) == 0
    assert missing(PLAN, rows_of(tmp_path)) == []


def test_a_turn_that_one_side_did_not_finish_is_done_again(tmp_path: Path) -> None:
    rows = [{"alternation": 0, "cell": CELLS[0].name, "side": "kvasir"}]
    assert missing(PLAN, rows) == PLAN and rows_of(tmp_path) == []


ONE_BATCH = cells([100, 500], [1], 8)


def row(alternation: int, cell: BatchCell, side: str, tok_s: float, **other: Any) -> dict[str, Any]:
    return {
        "alternation": alternation,
        "cell": cell.name,
        "side": side,
        "tok_s": tok_s,
        "decode_tok_s": tok_s * 2,
        "failures": 0,
        "client_share": 0.1,
        **other,
    }


def both(alternation: int, cell: BatchCell, ours: float, theirs: float) -> list[dict[str, Any]]:
    return [row(alternation, cell, "kvasir", ours), row(alternation, cell, "vllm", theirs)]


def test_ratios_are_taken_within_an_alternation_and_contexts_combined_within_it() -> None:
    short, long = ONE_BATCH
    rows = [
        *(one for turn, factor in enumerate((2.0, 3.0, 4.0)) for one in both(turn, short, factor * 7, 7.0)),
        *(one for turn, factor in enumerate((8.0, 3.0, 1.0)) for one in both(turn, long, factor, 1.0)),
    ]
    made = figures(rows, ONE_BATCH, "vllm")
    assert made["tok_s_ratio_b1_ctx100"] == pytest.approx(3.0)
    assert made["tok_s_ratio_b1_ctx100_worst"] == pytest.approx(2.0)
    assert made["tok_s_ratio_b1_ctx500"] == pytest.approx(3.0)
    assert made["tok_s_ratio_b1"] == pytest.approx(3.0)  # of 4, 3 and 2: roots of 16, 9 and 4
    assert made["tok_s_ratio_b1_worst"] == pytest.approx(2.0) and made["tok_s_b1_ctx100_vllm"] == 7.0
    assert made["decode_ratio_b1_ctx500"] == pytest.approx(3.0) and made["client_share_max"] == 0.1
    assert len(table(rows, ONE_BATCH, "vllm").rows) == 2


def test_the_same_seed_makes_the_same_prompts_and_they_differ_among_each_other() -> None:
    cell = BatchCell(100, 8, 4)
    first, again = (bodies(cell, 4096, random.Random(3)) for _ in range(2))
    assert first == again
    beginnings = {tuple(body["prompt"][:8]) for one in first for body in one}
    assert len(beginnings) == 8


CELL = BatchCell(30, 4, 96)
"""Long enough for threads whose time is counted in hundredths of a second."""
_PAUSE_S = 3.5
"""Longer than what makes a worker lost and a lease run out."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("side")
    served = start_kvasir(Setup(TINY_CHAT, 1, 8, Cores.choose().engine, folder))
    yield served
    served.tree.end()


@pytest.mark.slow
@pytest.mark.stack
def test_a_side_is_measured_before_and_after_a_pause(served: Server) -> None:
    rounds = bodies(CELL, vocabulary(TINY_CHAT), random.Random(1))
    cores = Cores.choose()
    thread = pin(served.tree, cores, lambda: run_batch(served.target, rounds[0], 30.0), served.engine)
    assert thread in served.tree.threads_of("worker-0")
    first, answers = measure(served, thread, CELL, rounds)
    assert (first.failures, first.error) == (0, "")
    assert [len(one) for one in answers] == [CELL.batch] * CELL.rounds
    assert first.tok_s == pytest.approx(CELL.tokens / first.wall_s) and 0 < first.engine_share <= 1.1
    assert first.client_share > 0
    served.tree.pause()
    time.sleep(_PAUSE_S)
    served.tree.resume()
    warm(served)
    again, _ = measure(served, thread, CELL, rounds)
    assert (again.failures, again.error) == (0, "") and again.engine_share > 0


def test_a_gguf_file_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    add_arguments(parser)
    file = tmp_path / "model.Q4_1.gguf"
    file.write_bytes(b"GGUF\x03")
    assert parser.parse_args(["--gguf", str(file)]).gguf == file
    (tmp_path / "text").write_text("weights")
    with pytest.raises(SystemExit):
        parser.parse_args(["--gguf", str(tmp_path / "text")])
    assert "is no GGUF file" in capsys.readouterr().err
