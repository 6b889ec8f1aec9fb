"""The prefix cache of vLLM workers in each other's host memory: as of native ones (`tests/stack`)."""

from collections.abc import Iterator

import pytest

from tests.stack.running import running_stack
from tests.stack.test_peer_cache import SETTINGS, PeerCache, check_a_hit, check_a_killed_creditor

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]
BLOCK_TOKENS = 32


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PeerCache]:
    folder = tmp_path_factory.mktemp("peers") / "run"
    with running_stack(folder, settings=SETTINGS, flags=("--engine", "vllm")) as stack:
        made = PeerCache(stack, BLOCK_TOKENS)
        yield made
        made.tenant.close()


async def test_a_hit_from_another_vllm_workers_host_memory_has_the_same_text(cache: PeerCache) -> None:
    await check_a_hit(cache)


def test_a_killed_vllm_creditor_is_a_miss(cache: PeerCache) -> None:
    check_a_killed_creditor(cache)
