"""One stack of two workers, shared by the tests that leave it as they found it."""

from collections.abc import Iterator

import pytest

from tests.stack.running import RunningStack, running_stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """The stack with the model that ships."""
    with running_stack(tmp_path_factory.mktemp("stack") / "run") as running:
        yield running
