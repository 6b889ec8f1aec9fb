"""The table of data files, and where files are looked for."""

import hashlib
import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bench.kit import datasets
from bench.kit.datasets import Source, cache_folder, download, find, folders, sources, state_of
from shared.errors import InternalError


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
    monkeypatch.setattr("bench.kit.datasets.folders", lambda _: [tmp_path])
    assert state_of(source, environ) == "missing"
    (tmp_path / source.path).parent.mkdir(parents=True)
    (tmp_path / source.path).write_text("something else")
    assert state_of(source, environ) == "differs"


CONTENT = b"arrival_s,prompt_tokens,output_tokens\n0.0,1,2\n"


class Quiet(SimpleHTTPRequestHandler):
    """Logs nothing."""

    def log_message(self, format: str, *args: Any) -> None:
        """Not wanted here."""


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "upstream"
    folder.mkdir()
    (folder / "trace.csv").write_bytes(CONTENT)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def source(url: str, content: bytes = CONTENT) -> Source:
    return Source("a/trace.csv", len(content), hashlib.sha256(content).hexdigest(), "MIT", "here", url)


def test_a_file_arrives_whole(url: str, tmp_path: Path) -> None:
    assert download(source(f"{url}/trace.csv"), tmp_path / "cache").read_bytes() == CONTENT


def test_a_changed_file_is_not_kept(url: str, tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="has changed"):
        download(source(f"{url}/trace.csv", b"something else"), tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


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
    monkeypatch.setattr(datasets, "sources", lambda: found)
    return found
