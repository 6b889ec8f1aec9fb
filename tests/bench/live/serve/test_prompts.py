"""What is asked: lessons and what is measured share no prompt, and arrivals are Poisson by seed."""

import json
import random
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from bench.kit.provenance import ROOT
from bench.live.serve.prompts import arrivals, drawn_prompts, read_prompts
from shared.errors import ConfigError

MODEL = ROOT / "models" / "tiny_chat"


def test_nothing_measured_was_a_lesson() -> None:
    drawn = drawn_prompts(random.Random(0), MODEL, lessons=60, measured=40, max_tokens=400, story_share=0.6)
    assert (len(drawn.lessons), len(drawn.measured)) == (60, 40)
    assert len({*drawn.lessons, *drawn.measured}) == 100
    assert drawn.mean_request_tokens > statistics.mean(map(len, drawn.measured)) + 10


def test_prompts_depend_on_the_draw_only() -> None:
    first, again, other = (
        drawn_prompts(random.Random(seed), MODEL, lessons=3, measured=3, max_tokens=400, story_share=0.5)
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_too_few_different_prompts_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps({"prompt": "Say hello.", "response": "Hello."}) + "\n")
    with pytest.raises(ConfigError, match="lower --lessons or --pool"):
        read_prompts(file, MODEL, lessons=1, measured=1, max_tokens=9)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    rows = [{"prompt": f"Count to {n}.", "length": 50 * n} for n in range(1, 5)]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    read = read_prompts(file, MODEL, lessons=2, measured=2, max_tokens=160)
    answers = read.mean_request_tokens - statistics.mean(map(len, read.measured))
    assert answers == pytest.approx(155, rel=0.04)


@pytest.mark.parametrize(
    "text", ["{", '{"response": "x"}', '{"prompt": "x"}', '{"prompt": "x", "length": "y"}']
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(ConfigError, match="each row needs"):
        read_prompts(tmp_path / "trace.jsonl", MODEL, lessons=1, measured=1, max_tokens=9)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        read_prompts(tmp_path / "none.jsonl", MODEL, lessons=1, measured=1, max_tokens=9)


def test_arrivals_are_the_same_at_every_rate_but_for_the_scale() -> None:
    slow, fast = list(arrivals(7, 50, 2.0, "a")), list(arrivals(7, 50, 8.0, "a"))
    assert [index for _, index in slow] == [index for _, index in fast]
    assert [at_s for at_s, _ in slow] == pytest.approx([4 * at_s for at_s, _ in fast])
    assert slow != list(arrivals(7, 50, 2.0, "b"))


def test_arrivals_are_poisson() -> None:
    times = [at_s for at_s, _ in arrivals(10, 4000, 5.0, "x")]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.15)


def test_every_prompt_comes_once_before_any_comes_again() -> None:
    indices = [index for _, index in arrivals(9, 22, 1.0, "x")]
    assert sorted(indices[:9]) == sorted(indices[9:18]) == list(range(9))
    assert len(set(indices[18:])) == 4
