"""`bench pie` as a command: what is refused."""

from pathlib import Path

from bench.cli import main


def test_what_there_is_not_is_refused(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing.jsonl"
    nothing.write_text("\n")
    assert main(["pie", "--simulated", "--models", "nobody", "--out", str(tmp_path)]) == 2
    assert main(["pie", "--quick", "--model", "nobody", "--out", str(tmp_path)]) == 2
    assert main(["pie", "--quick", "--trace", str(nothing), "--out", str(tmp_path)]) == 2
