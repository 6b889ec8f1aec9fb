"""`python -m bench serve --quick`: two real stacks, our policies against each other, and on with the run."""

import asyncio
import json
import random
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import cli
from bench.kit.load import Answer, Target
from bench.kit.provenance import ROOT
from bench.live.serve import figures
from bench.live.serve.arena import Asked, Level, ask_at_rate, measure
from bench.live.serve.plan import Plan, plan_of
from bench.live.serve.prompts import drawn_prompts, indices, read_prompts
from bench.live.serve.sides import kv_tokens_for
from bench.live.serve.turns import knee_step, next_step
from shared.errors import ConfigError
from tests.bench.rig import context_of


def serve(run_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: a bench binds itself to a core."""
    argv = [sys.executable, "-m", "bench", "serve", "--quick", "--out", str(run_dir), *words]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)


def result(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "result.json").read_text()))


SMALL = ["--lessons", "8", "--pool", "12", "--requests", "12", "--max-tokens", "48"]
"""Of a whole run."""


@pytest.mark.slow
@pytest.mark.stack
@pytest.mark.timeout(900)
def test_a_short_run_and_on_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is refused is refused before anything is started or bound, so that goes in this process."""
    first = serve(tmp_path, *SMALL, "--budget-s", "0.5")
    assert first.returncode == 0, first.stderr
    assert result(tmp_path)["incomplete"]
    refused = ["serve", "--quick", "--out", str(tmp_path), *SMALL]
    assert cli.main([*refused, "--resume", "--requests", "9"]) == 2
    assert "another workload" in capsys.readouterr().err
    done = serve(tmp_path, *SMALL, "--resume", "--beyond-requests", "8", "--budget-s", "300")
    assert done.returncode == 0, done.stderr
    made = result(tmp_path)
    assert (made["incomplete"], made["failures"]) == (False, 0)
    figures = made["figures"]
    ratio = figures["sustained_kvasir"] / figures["sustained_ours_vllm"]
    assert figures["policy_factor"] == pytest.approx(ratio) and 0 <= figures["slo_kvasir"] <= 1
    assert figures["same_length_share_min"] > 0.9
    cells = [json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines()]
    assert {(cell["kind"], cell["side"]) for cell in cells} >= {
        ("burst", "kvasir"), ("low", "ours_vllm"), ("search", "kvasir"), ("beyond", "ours_vllm"),
    }  # fmt: skip
    requests = (tmp_path / "requests.jsonl").read_text().splitlines()
    assert len(requests) == sum(cell["requests"] for cell in cells)
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG") and cli.main(refused) == 2
    assert "--resume" in capsys.readouterr().err


FEW = ["--lessons", "10", "--pool", "10", "--max-tokens", "64"]


def plan(tmp_path: Path, *words: str, quick: bool = False, seed: int = 0) -> Plan:
    return plan_of(context_of("serve", tmp_path, *FEW, *words, quick=quick, seed=seed))


def test_the_peer_comes_first_and_quick_has_none(tmp_path: Path) -> None:
    assert plan(tmp_path).sides == ("vllm", "ours_vllm", "kvasir", "oracle")
    assert plan(tmp_path, "--peer", "none", "--oracle", "no").sides == ("ours_vllm", "kvasir")
    quick = plan(tmp_path, quick=True)
    assert quick.sides == ("ours_vllm", "kvasir") and quick.requests < plan(tmp_path).requests
    assert plan(tmp_path, "--peer", "vllm", quick=True).sides == ("vllm", "ours_vllm", "kvasir")


def test_our_workers_can_have_the_peers_engine(tmp_path: Path) -> None:
    made = plan(tmp_path, "--engines", "--mechanisms", "tiers", "--prefix-tokens", "40", "--prefixes", "2")
    assert (made.engines, made.mechanisms) == (True, ("tiers",))
    assert made.identity() != plan(tmp_path, "--mechanisms", "tiers").identity()
    assert len({prompt[:40] for prompt in (*made.prompts.lessons, *made.prompts.measured)}) == 2
    assert len({prompt[40:] for prompt in made.prompts.measured}) == 10
    with pytest.raises(ConfigError, match="workers with engine vllm cannot have everything, pie"):
        plan(tmp_path, "--engines", "--mechanisms", "pie", "everything", "tiers")


def test_the_kv_is_whole_blocks_for_so_many_mean_requests(tmp_path: Path) -> None:
    made = plan(tmp_path, "--kv-requests", "12")
    assert made.kv_tokens % 32 == 0
    assert made.kv_tokens == pytest.approx(12 * made.prompts.mean_request_tokens, abs=32)
    assert made.context_tokens % 32 == 0 and made.context_tokens >= max(map(len, made.prompts.measured)) + 64
    assert plan(tmp_path, "--kv-tokens", "1000").kv_tokens == 1024 and kv_tokens_for(1.0, 1) == 32


def test_a_run_may_go_on_with_more_patience_but_not_with_other_prompts(tmp_path: Path) -> None:
    first = plan(tmp_path).identity()
    for words in (
        ["--budget-s", "5"],
        ["--alternations", "9"],
        ["--tolerance", "0.3"],
        ["--repeats", "3"],
        ["--price-turns", "2"],
        ["--beyond-requests", "9"],
    ):
        assert plan(tmp_path, *words).identity() == first
    for words in (["--requests", "7"], ["--kv-requests", "20"], ["--predictor", "histogram"]):
        assert plan(tmp_path, *words).identity() != first
    assert plan(tmp_path, seed=1).identity() != first


def search(knee: int, first: int) -> dict[int, bool]:
    """Steps tried, where everything up to `knee` is sustained."""
    tried: dict[int, bool] = {}
    while (step := next_step(tried, first)) is not None:
        assert step not in tried
        tried[step] = step <= knee
    return tried


@given(knee=st.integers(-47, 47), first=st.integers(-30, 30))
def test_it_finds_the_knee(knee: int, first: int) -> None:
    tried = search(knee, first)
    assert knee_step(tried) == knee and tried[knee] and not tried[knee + 1]


def test_what_no_rate_overloads_ends_too() -> None:
    assert knee_step(search(1000, 0)) == 48


@given(answers=st.dictionaries(st.integers(-48, 48), st.booleans(), max_size=30), first=st.integers(-9, 9))
def test_noise_does_not_lead_it_in_circles(answers: dict[int, bool], first: int) -> None:
    step = next_step(answers, first)
    assert step is None or step not in answers or step == first
    knee = knee_step(answers)
    assert knee is None or answers[knee]


def row(kind: str, side: str, **known: Any) -> dict[str, Any]:
    plain = {
        "rate_per_s": 1.0, "repeat": 0, "requests": 100, "failures": 0, "normalized_ms": 10.0,
        "attained": None, "attained_first": None, "ttft_ms_p50": 5.0, "itl_ms_p50": 4.0, "tok_s": 900.0,
        "engine_share": 0.9,
    }  # fmt: skip
    return {"kind": kind, "side": side, **plain, **known}


def test_the_peer_is_the_yardstick_where_there_is_one() -> None:
    ours = [row("low", "ours_vllm", normalized_ms=4.0)]
    assert figures.yardstick(ours) == "ours_vllm" and figures.limit_ms(ours) == 12.0
    both = [*ours, row("low", "vllm", normalized_ms=6.0), row("search", "vllm")]
    assert figures.yardstick(both) == "vllm" and figures.limit_ms(both) == 18.0
    assert figures.limit_ms([row("burst", "vllm")]) is None


@pytest.mark.parametrize(
    ("of_rate", "sustained"),
    [
        ([row("search", "a", normalized_ms=12.0)], True),
        ([row("search", "a", normalized_ms=12.1)], False),
        ([row("search", "a", normalized_ms=1.0, failures=1)], False),
        ([row("search", "a", normalized_ms=value) for value in (1.0, 99.0, 2.0)], True),
        ([row("search", "a", normalized_ms=value) for value in (1.0, 99.0, 20.0)], False),
    ],
)
def test_a_rate_is_sustained_in_the_median_and_without_failures(
    of_rate: list[dict[str, Any]], sustained: bool
) -> None:
    assert figures.is_sustained(of_rate, 12.0) is sustained


def test_the_parts_multiply_to_the_whole() -> None:
    knees = {"vllm": 4.0, "ours_vllm": 5.0, "kvasir": 9.0, "oracle": 10.0}
    made = figures.figures([row("low", "vllm")], knees)
    assert made["sustained_rate_ratio"] == pytest.approx(2.25) and made["policy_factor"] == pytest.approx(1.8)
    parts = made["engine_factor"] * made["policy_factor_oracle"] * made["prediction_factor"]
    assert parts == pytest.approx(made["sustained_rate_ratio"]) and made["sustained_kvasir"] == 9.0


def test_what_is_not_measured_has_no_figure() -> None:
    made = figures.figures([row("burst", "vllm", tok_s=700.0)], {"kvasir": 3.0})
    assert made == {"sustained_kvasir": 3.0, "burst_tok_s_vllm": 700.0}


def test_levels_are_compared_turn_by_turn() -> None:
    rows = [
        row("beyond", side, repeat=turn, rate_per_s=6.0, attained=share, attained_first=0.5)
        for side, shares in {"vllm": (0.2, 0.3, 0.0), "kvasir": (0.8, 0.9, 0.5)}.items()
        for turn, share in enumerate(shares)
    ]
    rows.append(
        row("beyond", "kvasir", repeat=1, rate_per_s=7.0, attained=0.1)
    )  # of an earlier, coarser knee
    made = figures.figures([row("low", "vllm"), *rows], {"vllm": 5.0})
    assert made["slo_vllm"] == 0.2 and made["slo_ratio"] == pytest.approx(4.0)
    assert made["slo_ratio_worst"] == pytest.approx(3.0)  # 0 counts as one request of a hundred: 50
    assert made["slo_first_ratio"] == 1.0 and "slo_policy_factor" not in made
    assert not any(name.startswith("slo") for name in figures.figures(rows, {"kvasir": 5.0}))
    unmatched = [row("beyond", "vllm", rate_per_s=6.0, attained=0.2), *rows[4:5]]
    assert "slo_ratio" not in figures.figures(unmatched, {"vllm": 5.0})


class Echo:
    """Answers each prompt with as many tokens as its first id says, and remembers what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        self.busy = self.most_busy = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = orjson.loads(await reader.readexactly(length))
        self.bodies.append(body)
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        await asyncio.sleep(0.01)
        self.busy -= 1
        tokens = body["prompt"][0]
        events = [{"choices": [{"text": "x", "finish_reason": None}]} for _ in range(tokens)]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": tokens}
        lines = [*(orjson.dumps(one) for one in (*events, {"choices": [], "usage": usage})), b"[DONE]"]
        text = b"".join(b"data: " + line + b"\n\n" for line in lines)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text)
        await writer.drain()
        writer.close()


@pytest.fixture
def echo() -> Iterator[tuple[Echo, Target]]:
    """In a thread of its own: the client has an event loop of its own too."""
    served, loop, ready = Echo(), asyncio.new_event_loop(), threading.Event()
    ports: list[int] = []
    over = asyncio.Event()

    async def run() -> None:
        async with await asyncio.start_server(served.serve, "127.0.0.1", 0) as server:
            ports.append(server.sockets[0].getsockname()[1])
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    assert ready.wait(60)
    yield served, Target(ports[0], "m")
    loop.call_soon_threadsafe(over.set)
    thread.join(60)
    loop.close()


def test_requests_tell_nothing_of_lengths(echo: tuple[Echo, Target]) -> None:
    served, target = echo
    asked = ask_at_rate(target, [[3, 1], [5]], [3, 5], requests=4, rate_per_s=200.0, max_tokens=9, seed="a")
    assert [one.true_tokens for one in asked] == [one.answer.completion_tokens for one in asked]
    assert {tuple(sorted(body)) for body in served.bodies} == {
        ("max_tokens", "model", "prompt", "stream", "stream_options", "temperature")
    }
    assert {body["max_tokens"] for body in served.bodies} == {9}
    made = measure(asked, None)
    assert (made.requests, made.failures, made.same_length, made.attained) == (4, 0, 1.0, None)


def asked_of(planned_s: float, first_s: float, ended_s: float, tokens: int, **known: object) -> Asked:
    answer = Answer(planned_s, [first_s], ended_s, tokens, prompt_tokens=2, **known)  # type: ignore[arg-type]
    return Asked(0, planned_s, tokens, answer)


def test_latencies_count_from_the_plan_and_failures_in_none() -> None:
    late = asked_of(0.0, 1.0, 3.0, 5)
    late.answer.sent_s = 0.5
    made = measure([late, asked_of(1.0, 1.5, 2.5, 2), asked_of(1.0, 9.0, 9.0, 0, error="no")], None)
    assert (made.requests, made.failures, made.error) == (3, 1, "no") and made.wall_s == 9.0
    assert made.tok_s == pytest.approx(7 / 9)
    assert made.normalized_ms == pytest.approx((3000 / 5 + 1500 / 2) / 2)
    assert made.ttft_ms_p50 == pytest.approx(750) and made.itl_ms_p50 == pytest.approx((500 + 1000) / 2)
    assert made.late_ms_max == pytest.approx(500)


def test_a_level_is_kept_by_the_true_length_and_by_no_failure() -> None:
    level = Level(prefill_s=0.5, token_s=0.1, scale=2.0)
    assert level.limit_s(5) == pytest.approx(2.0)
    on_time, too_late = asked_of(0.0, 1.0, 2.0, 5), asked_of(0.0, 1.0, 2.01, 5)
    failed = asked_of(0.0, 0.1, 0.1, 5, error="no")
    made = measure([on_time, too_late, failed, failed], level)
    assert (made.attained, made.attained_first) == (0.25, 1.0)


MODEL = ROOT / "models" / "tiny_chat"


def test_nothing_measured_was_a_lesson() -> None:
    drawn = drawn_prompts(random.Random(0), MODEL, lessons=60, measured=40, max_tokens=400, story_share=0.6)
    assert (len(drawn.lessons), len(drawn.measured)) == (60, 40)
    assert len({*drawn.lessons, *drawn.measured}) == 100
    assert drawn.mean_request_tokens > statistics.mean(map(len, drawn.measured)) + 10


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    rows = [{"prompt": f"Count to {n}.", "length": 50 * n} for n in range(1, 5)]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    read = read_prompts(file, MODEL, lessons=2, measured=2, max_tokens=160)
    answers = read.mean_request_tokens - statistics.mean(map(len, read.measured))
    assert answers == pytest.approx(155, rel=0.04)


@pytest.mark.parametrize("text", ["{", '{"reply": "x"}', '{"prompt": "x"}', '{"prompt": "x", "length": "y"}'])
def test_a_wrong_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(ConfigError, match="each row needs"):
        read_prompts(tmp_path / "trace.jsonl", MODEL, lessons=1, measured=1, max_tokens=9)


def test_every_prompt_comes_once_before_any_comes_again() -> None:
    found = indices(9, 22, random.Random("x"))
    assert sorted(found[:9]) == sorted(found[9:18]) == list(range(9)) and len(set(found[18:])) == 4
