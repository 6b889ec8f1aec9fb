"""Stacks that several files of tests share; each test leaves them able to serve."""

import hashlib
import json
from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.patience import STACK_PATIENCE_S
from tests.stack.client import OTHER_KEY
from tests.stack.running import RunningStack, running_stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """Two workers under default settings. Tests also kill its processes."""
    with running_stack(tmp_path_factory.mktemp("stack") / "run") as running:
        yield running


@pytest.fixture
def http(stack: RunningStack) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {stack.key}"}
    with httpx.Client(base_url=stack.url, headers=headers, timeout=STACK_PATIENCE_S) as client:
        yield client


@pytest.fixture
def client(stack: RunningStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{stack.url}/v1", api_key=stack.key, timeout=STACK_PATIENCE_S, max_retries=0
    ) as made:
        yield made


@pytest.fixture(scope="session")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """One worker with memory enough and no cache: the text that others should give, too."""
    settings = ("worker.kv_blocks=1024", "worker.prefix_cache.enabled=false")
    with running_stack(tmp_path_factory.mktemp("roomy") / "run", workers=1, settings=settings) as running:
        yield running


@pytest.fixture(scope="session")
def featured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """One worker; responses are stored, embeddings are means, and there is a second tenant."""
    folder = tmp_path_factory.mktemp("featured")
    other = {"other": {"sha256": hashlib.sha256(OTHER_KEY.encode()).hexdigest()}}
    settings = (
        f"gateway.stored_responses={folder / 'responses.db'}",
        "gateway.embedding_pooling=mean",
        f"gateway.keys={json.dumps(other)}",
    )
    with running_stack(folder / "run", workers=1, settings=settings) as running:
        yield running


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """Two simulated workers with little memory."""
    settings = ("worker.kv_blocks=64", "worker.simulated.speed=10")
    flags = ("--engine", "simulated")
    with running_stack(
        tmp_path_factory.mktemp("simulated") / "run", settings=settings, flags=flags
    ) as running:
        yield running
