"""Downloads from a real server on this machine: kept only when the bytes are the listed ones."""

import hashlib
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bench.datasets.download import download
from bench.datasets.sources import Source
from shared.errors import InternalError, UnavailableError

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


def test_what_is_not_there_or_not_reachable(url: str, tmp_path: Path) -> None:
    for wrong in (f"{url}/nothing.csv", "http://127.0.0.1:1/trace.csv"):
        with pytest.raises(UnavailableError):
            download(source(wrong), tmp_path / "cache")
