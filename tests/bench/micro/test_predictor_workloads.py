"""Workloads of the predictor bench."""

import json
import random
from pathlib import Path

import pytest

from bench.micro import predictor_workloads as workloads
from shared.errors import ConfigError
from shared.messages.sequence import unpack_tokens


def test_templates_are_drawn_from_the_generator_they_are_given() -> None:
    first, second, third = (workloads.templates(random.Random(seed), 20, 5) for seed in (1, 1, 2))
    assert first == second != third
    assert (len(first.train), len(first.test)) == (20, 5)
    decoded = workloads.tokenizer().decode(unpack_tokens(first.train[0].prompt), skip_special_tokens=False)
    assert decoded.endswith("<|assistant|>")
    assert all(sample.output_tokens >= 2 for sample in first.train), "a word and the end"


def test_a_file_is_split_in_halves_and_a_small_one_refused(tmp_path: Path) -> None:
    rows = [{"prompt": f"Give {number} tips.", "length": number + 1} for number in range(300)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    made = workloads.from_file(path)
    assert (made.name, len(made.train), len(made.test)) == ("rows", 150, 150)
    assert [sample.output_tokens for sample in made.test] == list(range(151, 301))
    path.write_text("\n".join(map(json.dumps, rows[:150])))
    with pytest.raises(ConfigError, match="200"):
        workloads.from_file(path)


def test_alpaca_is_split_as_the_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_DATA", str(tmp_path))
    assert not workloads.has_alpaca()
    folder = tmp_path / "alpaca"
    folder.mkdir()
    prompts = [{"id": number, "instruction": f"Say {number}", "input": "x"} for number in range(1, 10_004)]
    (folder / "alpaca_52002.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    lines = ["id,split,L_t0.0", *(f"{number},a,{number % 7 + 1}" for number in range(1, 10_004))]
    (folder / "alpaca_vicuna7b_response_lengths_20k.csv").write_text("\n".join(lines))
    assert workloads.has_alpaca()
    made = workloads.alpaca(5, 3)
    assert [sample.output_tokens for sample in made.train] == [2, 3, 4, 5, 6]
    assert [sample.output_tokens for sample in made.test] == [n % 7 + 1 for n in (10_001, 10_002, 10_003)]
    text = workloads.tokenizer().decode(unpack_tokens(made.test[0].prompt))
    assert text == "Say 10001\nx"


def test_the_shipped_model_writes_answers() -> None:
    made = None
    counts = []
    for count, workload in workloads.tiny_chat(random.Random(0), 4, 2, max_tokens=12, batch=3):
        counts.append(count)
        made = workload
    assert counts == [3, 6, 6] and made is not None
    assert (len(made.train), len(made.test)) == (4, 2)
    assert all(1 <= sample.output_tokens <= 12 for sample in made.train)
    assert all(sample.output_tokens == 12 for sample in made.train if sample.censored)
