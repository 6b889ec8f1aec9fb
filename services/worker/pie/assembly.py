"""Pie put together for one engine, from settings and the model's shapes.

The engine knows Pie, and Pie knows no engine: it is given memory and shapes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from services.worker.kv.tiers.resident import OpenStream, ResidentKv
from services.worker.pie.blocks import BlockPie
from services.worker.pie.core import sizes
from services.worker.pie.core.expansion import ExpansionController
from services.worker.pie.settings import PieSettings
from shared.clock import monotonic_s
from shared.errors import ConfigError

_WAIT_TIMEOUT_S = 30.0
"""A layer that takes longer to arrive is an error."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Shape of one block of one layer."""

    kv_heads: int
    head_dim: int
    value_dim: int
    block_tokens: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        elements = self.kv_heads * self.block_tokens * (self.head_dim + self.value_dim)
        return elements * self.dtype.itemsize


def assemble(
    settings: PieSettings,
    layers: Sequence[BlockShape],
    make_pools: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    open_stream: OpenStream | None,
    *,
    device_blocks: int,
    host_bytes: int,
    cache_blocks: int = 0,
    clock: Callable[[], float] = monotonic_s,
) -> BlockPie:
    """Return Pie on the bytes of `device_blocks` blocks of all layers, and at most `host_bytes` of host
    memory, plus that for `cache_blocks` of a prefix cache. `make_pools` returns the memory of so many blocks
    of one layer. Raises ConfigError where Pie is impossible, such as without `open_stream`."""
    if open_stream is None:
        raise ConfigError(
            "pie on a GPU copies blocks with Triton, which is not installed (make setup-gpu): install it, or "
            "set pie.enabled false",
            param="pie.enabled",
        )
    shape = layers[0]
    if any(layer != shape for layer in layers):
        raise ConfigError(
            "pie swaps blocks of layers of one shape, this model's differ: set pie.enabled false", param="pie"
        )
    count, host_blocks = len(layers), host_bytes // shape.block_bytes
    most = sizes.most_in_blocks(count, device_blocks, host_blocks)
    if settings.fifo_layers not in (0, *range(sizes.LEAST_FIFO_LAYERS, most + 1)):
        raise ConfigError(
            f"pie: {settings.fifo_layers} is no level: 0, or from 3 to {most} of this model's {count} layers "
            f"within {host_bytes >> 20} MiB of host memory",
            param="pie.fifo_layers",
        )
    level, limit = settings.fifo_layers, settings.bandwidth_limit
    controller, highest = None, level
    if most and settings.expansion == "auto":
        controller, highest = ExpansionController(count, most, level, sizes.swaps_in_blocks), most
    blocks = sizes.slot_blocks(count, highest, device_blocks)
    kv = ResidentKv(
        open_stream,
        *make_pools(count * device_blocks),
        count,
        ids=blocks + sizes.spare_blocks(count, highest, device_blocks),
        rows=blocks,
        host_blocks=cache_blocks,
        timeout_s=_WAIT_TIMEOUT_S,
    )
    pie = BlockPie(
        kv,
        device_blocks,
        controller,
        level,
        settings.window_iterations,
        clock,
        notice_s=settings.notice_s,
        on_demand=settings.enabled == "auto",
        block_s=kv.layer_block_bytes / limit if limit else kv.profile(),
        bandwidth_limit=limit,
    )
    pie.set_background(settings.background_traffic)
    return pie
