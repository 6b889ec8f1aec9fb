"""Figures get into the document from results only, and a new run replaces the old one."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.kit.outcome import Outcome, as_json, document
from bench.kit.record import inserted, main

TEXT = "# `engine`\n\nWhat it is.\n"


def result(name: str = "engine", **figures: float) -> dict[str, Any]:
    config = {"model": "models/tiny_chat", "peer": "vllm", "quick": False}
    made: dict[str, Any] = json.loads(
        as_json(document(name, config, Outcome(figures, 0, notes=["as it came"])))
    )
    return made


def test_a_block_is_put_at_the_end_of_the_page_and_replaced_later() -> None:
    once = inserted(TEXT, "engine, vllm, tiny_chat", result(tok_s_ratio_b1=1.25))
    assert "| `tok_s_ratio_b1` | 1.25 |" in once
    assert "As it came." in once
    twice = inserted(once, "engine, vllm, tiny_chat", result(tok_s_ratio_b1=1.5))
    assert "1.25" not in twice
    assert twice.count("<!-- begin") == 1
    both = inserted(twice, "engine, llamacpp", result(tok_s_ratio_b1=2.0))
    assert both.index("| `tok_s_ratio_b1` | 1.5 |") < both.index("| `tok_s_ratio_b1` | 2 |")
    assert both.startswith(TEXT)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, file, wrong = tmp_path / "engine.md", tmp_path / "result.json", tmp_path / "wrong.json"
    page.write_text(TEXT)
    file.write_text(json.dumps(result(a=1.0)))
    wrong.write_text("{}")
    assert main([str(file), "--pages", str(tmp_path)]) == 0
    assert "| `a` | 1 |" in page.read_text()
    assert main([str(wrong), "--pages", str(tmp_path)]) == 2
    assert "is no result of a bench" in capsys.readouterr().err
    file.write_text(json.dumps(result("unheard-of", a=1.0)))
    assert main([str(file), "--pages", str(tmp_path)]) == 2
    assert "unheard-of.md" in capsys.readouterr().err
