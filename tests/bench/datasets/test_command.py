"""`python -m bench data` with a data folder of the test's own."""

import hashlib
import json
from pathlib import Path

import pytest

from bench.datasets import command
from bench.datasets.sources import Source


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Source]:
    """Two files, one of them present; nothing can be downloaded."""
    monkeypatch.setenv("KVASIR_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "here.csv").write_bytes(b"1,2\n")
    digest = hashlib.sha256(b"1,2\n").hexdigest()
    found = [
        Source("here.csv", 4, digest, "MIT", "someone/here", ""),
        Source("kvasir-test-missing.csv", 4, digest, "CC-BY-4.0", "someone/there", "http://127.0.0.1:1/x"),
    ]
    monkeypatch.setattr(command, "sources", lambda: found)
    return found


def test_the_list_says_what_is_there(listed: list[Source], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    shown = capsys.readouterr().out
    for source in listed:
        assert source.sha256 in shown and source.licence in shown and source.upstream in shown
    assert "present" in shown
    assert "missing" in shown


def test_without_a_network_it_says_so_and_lists_all_the_same(
    listed: list[Source], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--json"]) == 0
    captured = capsys.readouterr()
    assert [one["state"] for one in json.loads(captured.out)["sets"]] == ["present", "missing"]
    assert "127.0.0.1:1" in captured.err


def test_a_file_with_another_content_is_an_error(listed: list[Source], tmp_path: Path) -> None:
    (tmp_path / "data" / "here.csv").write_bytes(b"3,4\n")
    assert command.main(["--list", "--json"]) == 1
