"""One stack for every client; and none of them leaves this machine.

Everything here runs in the clients' own virtual environment, where nothing of the stack is installed.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients import loopback
from tests.clients.serving import Serving, found, serving

_quiet = loopback.quiet_environment(os.environ)
for _name in set(os.environ) - set(_quiet):
    del os.environ[_name]
os.environ.update(_quiet)  # before any client is imported
loopback.stay()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stack", type=Path, help="run directory of a stack that is up; else one is started")


@pytest.fixture(scope="session")
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    run_dir: Path | None = request.config.getoption("--stack")
    if run_dir is not None:
        yield found(run_dir)
        return
    with serving(tmp_path_factory.mktemp("stack") / "run") as started:
        yield started


@pytest.fixture(autouse=True)
def _stays_on_this_machine() -> Iterator[None]:
    yield
    assert loopback.refused == []
