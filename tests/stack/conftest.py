"""Stacks that several files of tests share; each test leaves them able to serve. Each ends after the last
test that uses it, since an idle stack takes a tenth of a core."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

from tests.conftest import SHARED_STACKS, shared_by
from tests.patience import STACK_PATIENCE_S
from tests.stack.client import OTHER_KEY
from tests.stack.running import RunningStack, running_stack


def stack_of(name: str, **how: Any) -> Any:
    """A fixture of that name: a stack as `running_stack` starts it, for one file."""

    @pytest.fixture(scope="module", name=name)
    def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
        with running_stack(tmp_path_factory.mktemp(name) / "run", **how) as running:
            yield running

    return started


_open: dict[str, tuple[RunningStack, ExitStack]] = {}
"""Shared stacks that run, and what ends them, by fixture."""


def shared_stack(name: str, **how: Any) -> Any:
    """A fixture of that name, one of `SHARED_STACKS`: one stack for all tests of this process that use it."""
    assert name in SHARED_STACKS

    @pytest.fixture(scope="module", name=name)
    def started(tmp_path_factory: pytest.TempPathFactory) -> RunningStack:
        if name not in _open:
            with ExitStack() as starting:
                running = starting.enter_context(running_stack(tmp_path_factory.mktemp(name) / "run", **how))
                _open[name] = running, starting.pop_all()
        return _open[name][0]

    return started


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the shared stacks that no later test of any file uses."""
    items = item.session.items
    later = [] if nextitem is None else items[items.index(nextitem) :]
    for name in _open.keys() - {name for each in later for name in shared_by(each)}:
        _open.pop(name)[1].close()


def pytest_sessionfinish() -> None:
    """End what an interrupted run has left."""
    while _open:
        _open.popitem()[1][1].close()


SIMULATED = ("--engine", "simulated")
stack = shared_stack("stack", settings=("placement.log_level=debug",))
"""Two workers under default settings, and a line per route in the log. Tests also kill its processes."""
_ROOMY = ("worker.kv_blocks=1024", "worker.prefix_cache.enabled=false")
roomy = shared_stack("roomy", workers=1, settings=(*_ROOMY, "gateway.stored_responses="))
"""One worker with memory enough, no cache and no stored responses: the text that others should give, too."""
_LITTLE = ("worker.kv_blocks=64", "worker.simulated.speed=10")
simulated = shared_stack("simulated", settings=_LITTLE, flags=SIMULATED)
"""Two simulated workers with little memory."""


@pytest.fixture
def http(stack: RunningStack) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {stack.key}"}
    with httpx.Client(base_url=stack.url, headers=headers, timeout=STACK_PATIENCE_S) as client:
        yield client


@pytest.fixture
def client(stack: RunningStack) -> Iterator[openai.OpenAI]:
    with stack.openai_client() as made:
        yield made


_OTHER = {"other": {"sha256": hashlib.sha256(OTHER_KEY.encode()).hexdigest()}}
_FEATURED = ("gateway.embedding_pooling=mean", f"gateway.keys={json.dumps(_OTHER)}")
featured = shared_stack("featured", workers=1, settings=_FEATURED)
"""One worker; embeddings are means, and there is a second tenant."""
