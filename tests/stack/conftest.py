"""Stacks that several files of tests share; each test leaves them able to serve. They end with the last of
these tests, since an idle stack takes a tenth of a core."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.patience import STACK_PATIENCE_S
from tests.stack.client import OTHER_KEY
from tests.stack.running import RunningStack, running_stack


def stack_of(name: str, scope: Any = "module", **how: Any) -> Any:
    """A fixture of that name: a stack as `running_stack` starts it."""

    @pytest.fixture(scope=scope, name=name)
    def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
        with running_stack(tmp_path_factory.mktemp(name) / "run", **how) as running:
            yield running

    return started


SIMULATED = ("--engine", "simulated")
stack = stack_of("stack", "package", settings=("placement.log_level=debug",))
"""Two workers under default settings, and a line per route in the log. Tests also kill its processes."""
_ROOMY = ("worker.kv_blocks=1024", "worker.prefix_cache.enabled=false")
roomy = stack_of("roomy", "package", workers=1, settings=(*_ROOMY, "gateway.stored_responses="))
"""One worker with memory enough, no cache and no stored responses: the text that others should give, too."""
_LITTLE = ("worker.kv_blocks=64", "worker.simulated.speed=10")
simulated = stack_of("simulated", "package", settings=_LITTLE, flags=SIMULATED)
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


@pytest.fixture(scope="package")
def featured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """One worker; embeddings are means, and there is a second tenant."""
    folder = tmp_path_factory.mktemp("featured")
    other = {"other": {"sha256": hashlib.sha256(OTHER_KEY.encode()).hexdigest()}}
    settings = ("gateway.embedding_pooling=mean", f"gateway.keys={json.dumps(other)}")
    with running_stack(folder / "run", workers=1, settings=settings) as running:
        yield running
