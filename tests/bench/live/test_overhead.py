"""Direct calls of the engine run the policy's batches; a short run of the whole bench yields every figure."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.live.overhead.direct import run_direct
from services.worker.core.sampling import Sampled
from services.worker.engine.contract import Row
from shared.errors import InternalError

TINY_CHAT = Path(__file__).parents[3] / "models" / "tiny_chat"


class AddingEngine:
    """Answers a sequence of sum s with s, 2s, 4s … (mod 97); every iteration takes a second."""

    vocabulary = 97
    max_positions = 256
    block_tokens = 4
    weights = ""
    prefill_tokens_per_s = 0.0

    def __init__(self, kv_blocks: int = 64) -> None:
        self.kv_blocks = kv_blocks
        self.now_s = 0.0
        self.steps: list[int] = []
        self.written: dict[int, int] = {}

    def clock(self) -> float:
        return self.now_s

    def step(self, rows: Sequence[Row]) -> list[Sampled | None]:
        self.now_s += 1.0
        self.steps.append(sum(len(row.tokens) for row in rows))
        for row in rows:
            assert len(row.blocks) * self.block_tokens >= row.first_position + len(row.tokens)
            for offset, token in enumerate(row.tokens):
                slot = row.first_position + offset
                self.written[row.blocks[slot // self.block_tokens] * self.block_tokens + slot % 4] = token
        return [self._next(row) if row.point is not None else None for row in rows]

    def _next(self, row: Row) -> Sampled:
        """From the KV alone, so that a row in a wrong block or at a wrong position shows."""
        end = row.first_position + len(row.tokens)
        return Sampled(sum(self.written[row.blocks[at // 4] * 4 + at % 4] for at in range(end)) % 97)


def test_direct_calls_answer_every_prompt_in_full() -> None:
    engine = AddingEngine()
    one, two = run_direct(engine, [[1, 2, 3], [5] * 9], 6, 8, engine.clock)
    assert one.tokens == [1, 2, 3, 6, 12, 24, 48, 96, 95]
    assert two.tokens[9:] == [45, 90, 83, 69, 41, 82]
    assert one.token_s == two.token_s == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert engine.steps == [12, 2, 2, 2, 2, 2]


def test_preempted_sequences_are_computed_again() -> None:
    roomy, tight = AddingEngine(), AddingEngine(kv_blocks=7)
    prompts = [[number + 1] * 6 for number in range(3)]
    expected = [one.tokens for one in run_direct(roomy, prompts, 8, 8, roomy.clock)]
    assert [one.tokens for one in run_direct(tight, prompts, 8, 8, tight.clock)] == expected
    assert sum(tight.steps) > sum(roomy.steps)


def test_a_prompt_that_never_fits_is_an_error() -> None:
    engine = AddingEngine(kv_blocks=2)
    with pytest.raises(InternalError, match="more KV"):
        run_direct(engine, [[1] * 20], 4, 8, engine.clock)


@pytest.mark.slow
@pytest.mark.stack
def test_a_short_run_yields_every_figure(tmp_path: Path) -> None:
    words = ["--quick", "--alternations", "1", "--output-tokens", "8", "--streams", "24"]
    target = tmp_path / "result.json"
    argv = [sys.executable, "-m", "bench", "overhead", *words, "--out", str(tmp_path), "--json", str(target)]
    subprocess.run(argv, cwd=TINY_CHAT.parents[1], check=True, timeout=110)
    document = json.loads(target.read_text())
    figures = document["figures"]
    assert document["failures"] == 0 and figures["streams"] == 24
    wanted = {"added_ttft_ms_p50", "added_itl_ms_p50", "tok_s_ratio", "peak_rss_mb_gateway"}
    assert wanted <= set(figures)
    assert figures["tok_s_ratio"] > 0.05 and figures["engine_idle_share_b32"] < 0.9
