"""Pie put together for one engine: memory, controllers and a copier from settings and the model's shapes.

The engine knows Pie, and Pie knows no engine: it is given memory and shapes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from services.worker.pie.copier import Copier, InlineCopier, PacedLink, ThreadCopier
from services.worker.pie.core import sizes
from services.worker.pie.core.expansion import ExpansionController
from services.worker.pie.core.sizes import Partition
from services.worker.pie.core.swap import Direction, SwapController
from services.worker.pie.memory import BlockShape, LayerMemory
from services.worker.pie.resize import Growth
from services.worker.pie.settings import PieSettings
from services.worker.pie.store import LayerStore, SlotPools
from shared.clock import monotonic_s
from shared.errors import ConfigError

_MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Pie:
    """One engine's: `links` are where background traffic is injected (empty on a GPU)."""

    store: LayerStore
    growth: Growth
    links: dict[Direction, PacedLink]


def assemble(
    settings: PieSettings,
    layers: Sequence[BlockShape],
    make_pools: Callable[[int], SlotPools],
    *,
    device_blocks: int,
    device: torch.device,
    clock: Callable[[], float] = monotonic_s,
) -> Pie:
    """On the bytes that `device_blocks` blocks of all layers take: `make_pools` gives the memory of so many
    blocks of one layer. Raises ConfigError where Pie cannot be."""
    shape = _common_shape(layers)
    count, host_blocks = len(layers), settings.host_mb * _MEBIBYTE // shape.block_bytes
    most = sizes.most_within_host(count, device_blocks, host_blocks)
    if settings.fifo_layers not in (0, *range(sizes.LEAST_FIFO_LAYERS, most + 1)):
        raise ConfigError(
            f"pie: {settings.fifo_layers} layers cannot be swapped: 0, or from 3 to {most} of this model's "
            f"{count} within host_mb {settings.host_mb}",
            param="pie.fifo_layers",
        )
    partition = Partition(count * device_blocks, sizes.device_slots(count, settings.fifo_layers))
    memory = LayerMemory(shape, partition, device, *make_pools(count * device_blocks))
    copier, links = _make_copier(settings, memory, clock)
    is_growing = settings.expansion == "auto" and most > 0
    longest = most if is_growing else settings.fifo_layers
    kept_layers = sizes.kept_layers(count, longest, device_blocks, host_blocks)
    controller = SwapController(count, settings.fifo_layers, kept_layers)
    store = LayerStore(controller, memory, copier, clock, wait_timeout_s=settings.wait_timeout_s)
    expansion = ExpansionController(count, most, fifo_layers=settings.fifo_layers) if is_growing else None
    growth = Growth(
        store, device_blocks, expansion, settings.window_iterations, clock, notice_s=settings.notice_s
    )
    return Pie(store, growth, links)


def _common_shape(layers: Sequence[BlockShape]) -> BlockShape:
    first = layers[0]
    if any(layer != first for layer in layers):
        raise ConfigError(
            "pie swaps layers of one shape, this model's differ: set pie.enabled false", param="pie"
        )
    return first


def _make_copier(
    settings: PieSettings, memory: LayerMemory, clock: Callable[[], float]
) -> tuple[Copier, dict[Direction, PacedLink]]:
    if memory.device.type == "cuda":
        from services.worker.pie.streams import StreamCopier  # CUDA only

        return StreamCopier(memory), {}
    links = {direction: PacedLink(settings.bandwidth_limit, clock, time.sleep) for direction in Direction}
    for link in links.values():
        link.background_bytes_s = settings.background_traffic
    make = ThreadCopier if settings.overlap else InlineCopier
    return make(memory, links, clock), links
