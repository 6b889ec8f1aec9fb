"""The table of data files, and where files are looked for."""

import re
from pathlib import Path

import pytest

from bench.datasets.sources import cache_folder, find, folders, sha256_of, sources, state_of


def test_every_file_has_licence_upstream_and_hash() -> None:
    listed = sources()
    assert len({one.path for one in listed}) == len(listed) > 50
    for one in listed:
        assert re.fullmatch(r"[0-9a-f]{64}", one.sha256), one.path
        assert one.bytes > 0 and one.licence and one.upstream, one.path
        assert one.url == "" or one.url.startswith("https://"), one.path


def test_the_own_folder_comes_first_then_the_cache(tmp_path: Path) -> None:
    environ = {"KVASIR_DATA": str(tmp_path / "own"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert folders(environ)[0] == tmp_path / "own"
    assert folders(environ)[-1] == cache_folder(environ) == tmp_path / "cache" / "kvasir" / "data"
    for folder in (tmp_path / "own", cache_folder(environ)):
        (folder / "azure").mkdir(parents=True)
        (folder / "azure" / "only-here.csv").write_text(folder.name)
    assert find("azure/only-here.csv", environ) == tmp_path / "own" / "azure" / "only-here.csv"
    assert find("azure/nowhere.csv", environ) is None


def test_another_content_under_the_name_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = sources()[0]
    environ = {"KVASIR_DATA": str(tmp_path)}
    monkeypatch.setattr("bench.datasets.sources.folders", lambda _: [tmp_path])
    assert state_of(source, environ) == "missing"
    (tmp_path / source.path).parent.mkdir(parents=True)
    (tmp_path / source.path).write_text("something else")
    assert state_of(source, environ) == "differs"


def test_the_hash_is_of_the_content(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"abc")
    assert sha256_of(file).startswith("ba7816bf8f01cfea414140de5dae2223")
