"""Copies by CUDA streams: the same bytes, and overlap that events measure. Needs a CUDA device."""

import pytest
import torch

from services.worker.pie.memory import BlockShape, LayerMemory
from services.worker.pie.partition import Partition
from services.worker.pie.sizes import device_slots
from services.worker.pie.store import LayerStore
from services.worker.pie.streams import StreamCopier
from services.worker.pie.swap import SwapController
from shared.clock import monotonic_s

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_layers_keep_their_bytes_on_a_gpu() -> None:
    layers, blocks, fifo_layers = 9, 16, 4
    shape, device = BlockShape(4, 64, 64, 16, torch.bfloat16), torch.device("cuda")
    keys = torch.zeros(layers * blocks, *shape.key, dtype=shape.dtype, device=device)
    values = torch.zeros(layers * blocks, *shape.value, dtype=shape.dtype, device=device)
    partition = Partition(layers * blocks, device_slots(layers, fifo_layers))
    memory = LayerMemory(shape, partition, device, keys, values)
    store = LayerStore(
        SwapController(layers, fifo_layers), memory, StreamCopier(memory), monotonic_s, wait_timeout_s=10
    )
    store.attach(lambda: list(range(blocks)))
    for step in range(20):
        store.step_begins([])
        for layer in range(layers):
            pools = store.enter(layer)
            for pool in pools:
                written = float(100 * layer + step)
                if step:
                    assert bool((pool[:blocks] == written - 1).all())
                pool[:blocks] = written
            store.leave(layer)
        store.step_ends(1, is_decoding=True)
    assert min(store.meter.moved_bytes.values()) > 0
    assert store.close(10)
