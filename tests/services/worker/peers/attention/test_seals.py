"""Lent memory in the engine's layout; a block whose bytes have changed is found before its debtor gets it."""

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.engine.native import library as native
from services.worker.engine.native.library import AttentionMode
from services.worker.engine.paged import Shape
from services.worker.engine.spans import Span, pack
from services.worker.peers.attention.core.cost import ShipMode
from services.worker.peers.attention.memory import (
    LentMemory,
    NativeSeals,
    TorchSeals,
    device_memory,
    host_memory,
)
from services.worker.peers.settings import HostAttention
from shared.errors import CorruptedKv, CreditorLost
from tests.patience import wait_until
from tests.services.worker.peers.attention.rig import (
    BLOCK_TOKENS,
    DIM,
    HEADS,
    KV_HEADS,
    add_host,
    always,
    connect,
    lender,
    make_engine,
)

LAYERS = 2
BLOCKS = [4, 1, 3]
LENGTH = 2 * BLOCK_TOKENS + 3


def flip(memory: LentMemory, layer: int, which: int, block: int, rng: random.Random) -> None:
    """Flip one bit."""
    words = memory.pools[layer][which][block].view(torch.int32).view(-1)
    words[rng.randrange(len(words))] ^= 1 << rng.randrange(31)


def written(memory: LentMemory) -> None:
    """Rows of one sequence in three blocks."""
    memory.backend.adopt(np.array(BLOCKS, dtype=np.int32), np.full(len(BLOCKS), 7))
    for layer in range(LAYERS):
        slots = [block * BLOCK_TOKENS + at for block in BLOCKS for at in range(BLOCK_TOKENS)][:LENGTH]
        kv = torch.randn(2, LENGTH, KV_HEADS, DIM)
        memory.backend.write(layer, kv[0], kv[1], torch.tensor(slots))


def attended(memory: LentMemory, layer: int) -> torch.Tensor:
    spans = pack([Span(LENGTH, 1, [*BLOCKS, 0])], BLOCK_TOKENS)
    return memory.backend.attend_part(layer, spans, torch.ones(1, HEADS, DIM), Shape(0.25))[0]


@pytest.mark.parametrize("attention", ["auto", "torch"])
@pytest.mark.parametrize("seed", range(20))
def test_a_flipped_bit_is_always_found(llama: Any, attention: AttentionMode, seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(llama, 6, attention)
    memory = device_memory(engine.attention) if seed % 2 else host_memory(engine.attention, 6)
    written(memory)
    before = [attended(memory, layer) for layer in range(LAYERS)]
    layer, which, block = rng.randrange(LAYERS), rng.randrange(2), rng.choice(BLOCKS)
    pool = memory.pools[layer][which]
    sound = pool.clone()
    flip(memory, layer, which, block, rng)
    with pytest.raises(CorruptedKv) as found:
        attended(memory, layer)
    assert found.value.block == block
    with pytest.raises(CorruptedKv):
        memory.backend.verify(layer, np.array(BLOCKS, dtype=np.int32))
    with pytest.raises(CorruptedKv):
        new = torch.ones(1, KV_HEADS, DIM)
        memory.backend.write(layer, new, new, torch.tensor([block * BLOCK_TOKENS + BLOCK_TOKENS - 1]))
    assert torch.equal(attended(memory, 1 - layer), before[1 - layer]), "other layers are as they were"
    pool.copy_(sound)
    assert torch.equal(attended(memory, layer), before[layer])


@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_damage_before_a_loan_is_ignored(llama: Any, attention: AttentionMode) -> None:
    memory = device_memory(make_engine(llama, 6, attention).attention)
    written(memory)
    flip(memory, 0, 0, BLOCKS[1], random.Random(1))
    memory.backend.adopt(np.array(BLOCKS[1:2], dtype=np.int32), np.array([8]))
    new = torch.ones(1, KV_HEADS, DIM)
    memory.backend.write(0, new, new, torch.tensor([BLOCKS[1] * BLOCK_TOKENS]))
    attended(memory, 0)
    flip(memory, 0, 1, BLOCKS[0], random.Random(2))
    with pytest.raises(CorruptedKv):
        attended(memory, 0)


@pytest.mark.parametrize("mode", list(ShipMode))
@pytest.mark.parametrize("is_host", [False, True])
def test_the_debtor_loses_the_creditor_and_gets_no_token(llama: Any, mode: ShipMode, is_host: bool) -> None:
    with lender(llama, 6, host_blocks=6) as owner:
        engine = make_engine(llama, 1)
        debtor = connect(engine, [] if is_host else [owner.dial()], 6, choose=always(mode))
        if is_host:
            add_host(debtor, owner, range(1, 7))
        table = [2, 3, 4]
        rows = torch.randn(3, 2 * BLOCK_TOKENS, 2 * KV_HEADS + HEADS, DIM)
        attention = engine.attention

        def step(first: int, count: int) -> None:
            attention.begin([Span(first, count, table)], 1 if count == 1 else 0)
            try:
                for layer in range(LAYERS):
                    given = rows[layer, :count]
                    q, k, v = given[:, :HEADS], given[:, HEADS:-KV_HEADS], given[:, -KV_HEADS:]
                    attention.attend(layer, q, k, v, Shape(0.25))
                attention.end()
            except CreditorLost:
                attention.abandon()
                raise

        step(0, 2 * BLOCK_TOKENS)
        step(2 * BLOCK_TOKENS, 1)
        memory = owner.host if is_host else device_memory(owner.engine.attention)
        assert memory is not None
        flip(memory, 1, 0, 2, random.Random(3))
        with pytest.raises(CreditorLost, match="not what was written"):
            step(2 * BLOCK_TOKENS + 1, 1)
        # On the thread that serves the link: the debtor may hear of it first.
        wait_until(lambda: owner.creditor.corrupted_blocks == 1)
        debtor.close()


def test_host_memory_is_a_separate_pool_of_the_same_layout(llama: Any) -> None:
    engine = make_engine(llama, 6)
    device, host = device_memory(engine.attention), host_memory(engine.attention, 4)
    assert (device.blocks, host.blocks) == (6, 4)
    for (k_own, v_own), (k_host, v_host) in zip(device.pools, host.pools, strict=True):
        assert k_host.shape[1:] == k_own.shape[1:] and v_host.shape[1:] == v_own.shape[1:]
        assert (k_host.dtype, k_host.device.type) == (k_own.dtype, "cpu")
    host.pools[0][0].fill_(1.0)
    assert not engine.pools[0][0].any()


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


def test_which_worker_attends_to_host_memory() -> None:
    assert HostAttention.AUTO.attends("cpu") and not HostAttention.AUTO.attends("cuda")
    assert HostAttention.COMPUTE.attends("cuda") and not HostAttention.FETCH.attends("cpu")
