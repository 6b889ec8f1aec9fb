"""One stack; and nothing leaves this machine."""

import os
from collections.abc import Iterator

import pytest

from tests.clients import loopback
from tests.clients.serving import Serving, serving

os.environ.update(loopback.QUIET | {"HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
loopback.stay()


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("stack") / "run") as started:
        yield started
