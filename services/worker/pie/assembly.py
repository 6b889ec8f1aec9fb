"""Pie put together for one engine: memory, controllers and a copier from settings and the model's shapes.

The engine knows Pie, and Pie knows no engine: it is given memory and shapes.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.tiers.resident import OpenStream
from services.worker.pie.blocks import BlockPie, block_pie
from services.worker.pie.copier import Copier, InlineCopier, PacedLink, ThreadCopier
from services.worker.pie.core import sizes
from services.worker.pie.core.expansion import ExpansionController
from services.worker.pie.core.meter import SwapMeter
from services.worker.pie.core.pool import ElasticPool
from services.worker.pie.core.sizes import Partition
from services.worker.pie.core.swap import Direction, SwapController
from services.worker.pie.memory import BlockShape, LayerMemory
from services.worker.pie.resize import Expansion, Growth
from services.worker.pie.settings import PieSettings
from services.worker.pie.store import LayerStore, SlotPools
from shared.clock import monotonic_s
from shared.errors import ConfigError

_MEBIBYTE = 1 << 20


class Pie(Protocol):
    """One engine's: more blocks than the device holds, in either form. Called by the engine's thread."""

    @property
    def meter(self) -> SwapMeter: ...

    @property
    def capacity_blocks(self) -> int:
        """What plans may count on from the next one on."""
        ...

    @property
    def most_blocks(self) -> int:
        """What a sequence may count on, if it is alone."""
        ...

    @property
    def lendable_share(self) -> float:
        """Of the device's blocks, what other workers may have at most."""
        ...

    def demand(self, blocks: int) -> None:
        """A sequence needs so many, all in all, and cannot begin with fewer. To be repeated while it
        waits."""
        ...

    def make_pool(self, block_tokens: int) -> BlockPool:
        """The pool whose size follows."""
        ...

    def watch(self, used_blocks: Callable[[], int], shed: Callable[[int], None]) -> None:
        """Who keeps blocks that nobody uses, where that can be: how many are used, and who lets others go."""
        ...

    def expansion(self) -> Expansion: ...

    def step_begins(self, blocks: Iterable[Sequence[int]], written: Iterable[Sequence[int]]) -> None:
        """Of each row of a step: its blocks, and those of them that it writes to."""
        ...

    def step_ends(self, tokens: int, *, is_decoding: bool) -> None:
        """It sampled so many tokens; `is_decoding`: and computed no prompt."""
        ...

    def rest(self) -> None:
        """There is no step just now: a change of size goes on as far as that can be."""
        ...

    def set_background(self, bytes_s: float) -> None:
        """Others send so much over the link in each direction, for experiments on a CPU."""
        ...

    def close(self, deadline_s: float) -> bool:
        """False when that took longer."""
        ...


@dataclass(frozen=True, slots=True)
class LayerPie:
    """Implements `Pie`: `links` are where background traffic is injected (empty on a GPU)."""

    store: LayerStore
    growth: Growth
    links: dict[Direction, PacedLink]

    @property
    def meter(self) -> SwapMeter:
        return self.store.meter

    @property
    def capacity_blocks(self) -> int:
        return self.growth.capacity_blocks

    @property
    def most_blocks(self) -> int:
        """See `Pie`. As many as there are: slots are not cut anew for one sequence."""
        return self.growth.capacity_blocks

    @property
    def lendable_share(self) -> float:
        """See `Pie`. None: blocks lie in no fixed place."""
        return 0.0

    def demand(self, blocks: int) -> None:
        """See `Pie`. Slots are not cut anew for one sequence."""

    def make_pool(self, block_tokens: int) -> BlockPool:
        """See `Pie`."""
        pool = ElasticPool(self.growth.capacity_blocks, block_tokens)
        self.growth.attach(pool)
        return pool

    def watch(self, used_blocks: Callable[[], int], shed: Callable[[int], None]) -> None:
        """See `Pie`. There is no cache beside layers that move."""

    def expansion(self) -> Expansion:
        return self.growth.expansion()

    def step_begins(self, blocks: Iterable[Sequence[int]], written: Iterable[Sequence[int]]) -> None:
        """See `Pie`."""
        self.store.step_begins(blocks, written)

    def step_ends(self, tokens: int, *, is_decoding: bool) -> None:
        """See `Pie`."""
        self.store.step_ends(tokens, is_decoding=is_decoding)
        self.growth.after_step()

    def rest(self) -> None:
        """See `Pie`. Layers change size with steps."""

    def set_background(self, bytes_s: float) -> None:
        """See `Pie`."""
        for link in self.links.values():
            link.background_bytes_s = bytes_s

    def close(self, deadline_s: float) -> bool:
        return self.store.close(deadline_s)


def assemble(
    settings: PieSettings,
    layers: Sequence[BlockShape],
    make_pools: Callable[[int], SlotPools],
    *,
    device_blocks: int,
    device: torch.device,
    open_stream: OpenStream | None = None,
    clock: Callable[[], float] = monotonic_s,
) -> "LayerPie | BlockPie":
    """On the bytes that `device_blocks` blocks of all layers take: `make_pools` gives the memory of so many
    blocks of one layer. In blocks only with `open_stream`. Raises ConfigError where Pie cannot be."""
    shape = _common_shape(layers)
    count, host_blocks = len(layers), settings.host_mb * _MEBIBYTE // shape.block_bytes
    in_blocks = settings.form == "blocks" and open_stream is not None
    fitting = sizes.most_in_blocks if in_blocks else sizes.most_within_host
    most = fitting(count, device_blocks, host_blocks)
    if settings.fifo_layers not in (0, *range(sizes.LEAST_FIFO_LAYERS, most + 1)):
        raise ConfigError(
            f"pie: {settings.fifo_layers} layers cannot be swapped: 0, or from 3 to {most} of this model's "
            f"{count} within host_mb {settings.host_mb}",
            param="pie.fifo_layers",
        )
    is_growing = settings.expansion == "auto" and most > 0
    pools = make_pools(count * device_blocks)
    if in_blocks:
        assert open_stream is not None
        return block_pie(settings, open_stream, pools, count, device_blocks, most if is_growing else 0, clock)
    partition = Partition(count * device_blocks, sizes.device_slots(count, settings.fifo_layers))
    memory = LayerMemory(shape, partition, device, *pools)
    copier, links = _make_copier(settings, memory, clock)
    longest = most if is_growing else settings.fifo_layers
    kept_layers = sizes.kept_layers(count, longest, device_blocks, host_blocks)
    controller = SwapController(count, settings.fifo_layers, kept_layers)
    store = LayerStore(controller, memory, copier, clock, wait_timeout_s=settings.wait_timeout_s)
    expansion = ExpansionController(count, most, fifo_layers=settings.fifo_layers) if is_growing else None
    growth = Growth(
        store, device_blocks, expansion, settings.window_iterations, clock, notice_s=settings.notice_s
    )
    return LayerPie(store, growth, links)


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
