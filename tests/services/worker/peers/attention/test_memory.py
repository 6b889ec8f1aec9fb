"""Host memory for other workers: the engine's layout, in RAM, as large as the settings say."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.worker.engine.native import library as native
from services.worker.peers.attention.assembly import block_bytes, host_blocks
from services.worker.peers.attention.memory import device_memory, host_memory
from services.worker.peers.attention.seals import NativeSeals, TorchSeals
from services.worker.peers.lending.core.settings import HostAttention, LendingConfig
from shared.errors import ConfigError
from tests.services.worker.peers.attention.rig import make_engine


def test_host_memory_is_a_separate_pool_of_the_same_layout(llama: Any) -> None:
    engine = make_engine(llama, 6)
    device, host = device_memory(engine.attention), host_memory(engine.attention, 4)
    assert (device.blocks, host.blocks) == (6, 4)
    for (k_own, v_own), (k_host, v_host) in zip(device.pools, host.pools, strict=True):
        assert k_host.shape[1:] == k_own.shape[1:] and v_host.shape[1:] == v_own.shape[1:]
        assert (k_host.dtype, k_host.device.type) == (k_own.dtype, "cpu")
    host.pools[0][0].fill_(1.0)
    assert not engine.pools[0][0].any()
    assert host.nbytes == 4 * block_bytes(engine.pools) and device.nbytes == 6 * host.nbytes // 4


@pytest.mark.parametrize("attends", [True, False])
def test_host_memory_is_in_ram_for_an_engine_on_another_device(attends: bool) -> None:
    pool = torch.zeros(5, 2, 16, 4, device="meta"), torch.zeros(5, 2, 4, 16, device="meta")
    library_for = partial(native.choose, "auto", dtype=torch.float32)
    attention: Any = SimpleNamespace(
        pools=[pool, pool], threads=1, library_for=lambda device: library_for(device=device)
    )
    host = host_memory(attention, 3, attends=attends)
    assert host.attends is attends
    assert [tuple(each.shape) for each in host.pools[1]] == [(3, 2, 16, 4), (3, 2, 4, 16)]
    assert all(each.device.type == "cpu" for pools in host.pools for each in pools)
    assert isinstance(host.backend, NativeSeals | TorchSeals)
    host.backend.write(0, torch.ones(1, 2, 16), torch.ones(1, 2, 16), torch.tensor([5]))
    assert host.pools[0][0][1, :, :, 1].eq(1).all()


def test_the_settings_grant_blocks_or_mebibytes(llama: Any) -> None:
    pools = make_engine(llama, 2).pools
    assert host_blocks(LendingConfig(), pools) == 0
    assert host_blocks(LendingConfig(host_mb=1), pools) == (1 << 20) // block_bytes(pools)
    assert host_blocks(LendingConfig(host_mb=1, host_blocks=7), pools) == 7
    large = torch.zeros(1, 1 << 10, 1 << 10, 4, device="meta")
    huge: Any = [(large, large)]
    with pytest.raises(ConfigError, match="holds no block"):
        host_blocks(LendingConfig(host_mb=1), huge)


def test_which_worker_attends_to_host_memory() -> None:
    assert HostAttention.AUTO.attends("cpu") and not HostAttention.AUTO.attends("cuda")
    assert HostAttention.COMPUTE.attends("cuda") and not HostAttention.FETCH.attends("cpu")
