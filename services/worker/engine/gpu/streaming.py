"""Fetches blocks from the host during a step on a CUDA device, also inside CUDA graphs.

Without a graph, each layer's copy is submitted during the step (`TorchStream`). In a graph, layer l's copy
is a branch that starts after layer l - 2 and that layer l joins. The kernels read the copied blocks from
static memory, which one upload per step fills:

    numbers: [fetched blocks, of them kept, parity of layer 0, table entries]
             [rows of host memory] [places that stay, -1: none] [buffers, even] [buffers, odd]

Events inside a graph cannot be timed, so the kernels record timestamps, and the last one adds them up in
memory that the host reads."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from services.worker.engine import paged
from services.worker.engine.gpu.attention import INTERPRETED, launch
from services.worker.engine.gpu.kernels import account_kernel, fetch_layer_kernel, point_kernel, stamp_kernel
from services.worker.engine.gpu.lanes import COPY_LANES, COPY_PROGRAMS, GpuLanes
from services.worker.engine.gpu.spans import TABLE_END
from services.worker.engine.stream import TorchStream
from services.worker.kv.tiers.resident import BlockStream, StreamFigures, StreamWork
from shared.errors import ConfigError

_log = logging.getLogger("kvasir.worker.pie")
_Found = TypeVar("_Found")
_HEADER = 4
_STAMPS = 4
"""Timestamps per layer: start and end of its copy, arrival of the computation, end of its attention."""
_BEGAN, _ENDED, _WANTED, _LEFT = range(_STAMPS)
_SUMS = 5
"""Nanoseconds stalled and copied; number of layers, of early layers, and of one-layer blocks."""
_PORTABLE_AND_MAPPED = 3
"""Flags of cudaHostRegister that let kernels access the memory."""


class LayerFetches:
    """Static memory and kernel launches of the fetches inside a graph."""

    def __init__(self, lanes: GpuLanes, layers: int, device_blocks: int) -> None:
        self._lanes, self._layers, self._device_blocks = lanes, layers, device_blocks
        device = lanes.device
        self._numbers = torch.zeros(_HEADER + 4 * lanes.rows, dtype=torch.int32, device=device)
        self._stamps = torch.zeros(_STAMPS * layers, dtype=torch.int64, device=device)
        sums = torch.zeros(_SUMS, dtype=torch.int64)
        self._sums = sums.pin_memory() if device.type == "cuda" else sums

    def fill(self, work: StreamWork, *, first: int, is_ahead: bool) -> None:
        """Upload a step's work. `first`: buffer of layer 0; `is_ahead`: kept blocks are already there."""
        kept = work.kept if is_ahead else 0
        header = np.array([len(work.fetched), kept, first, len(work.tables) + len(TABLE_END)], np.int32)
        numbers = np.concatenate([header, work.fetched, work.place, work.even, work.odd]).astype(np.int32)
        paged.fill(self._numbers, torch.from_numpy(numbers))

    def gate(self, raw: torch.Tensor, pointed: torch.Tensor) -> "ReplayedGate":
        """Return the gate of a capture. `raw`: the step's tables with `TABLE_END`; `pointed`: a layer's."""
        return ReplayedGate(self, self._lanes.cuda, self._layers, raw, pointed)

    def bring(self, layer: int) -> Any:
        """Launch a layer's copy after the computation submitted so far; return the event of its end."""
        key_words, value_words = self._lanes.words
        with self._lanes.inwards() as came:
            launch(
                fetch_layer_kernel,
                (COPY_PROGRAMS,),
                (self._numbers, *self._lanes.memory, self._stamps, layer),
                LAYERS=self._layers,
                DEVICE_BLOCKS=self._device_blocks,
                KEY_WORDS=key_words,
                VALUE_WORDS=value_words,
                LANES=COPY_LANES,
                PROGRAMS=COPY_PROGRAMS,
                IS_TIMED=not INTERPRETED,
                num_warps=8,
            )
        return came

    def note(self, layer: int, stamp: int) -> None:
        """Launch the recording of a timestamp."""
        at = _STAMPS * layer + stamp
        launch(stamp_kernel, (1,), (self._stamps, at), IS_TIMED=not INTERPRETED, num_warps=1)

    def point(self, layer: int, raw: torch.Tensor, pointed: torch.Tensor) -> None:
        """Launch the update of the tables for a layer."""
        launch(
            point_kernel,
            (COPY_PROGRAMS,),
            (raw, pointed, self._numbers, layer),
            DEVICE_BLOCKS=self._device_blocks,
            LANES=COPY_LANES,
            PROGRAMS=COPY_PROGRAMS,
            num_warps=4,
        )

    def account(self) -> None:
        """Launch the summation of all layers' timestamps."""
        launch(
            account_kernel,
            (1,),
            (self._stamps, self._numbers, self._sums),
            LAYERS=self._layers,
            LAYER_LANES=1 << (self._layers - 1).bit_length(),
            num_warps=1,
        )

    def add_to(self, figures: StreamFigures) -> StreamFigures:
        """Return `figures` plus the sums of all replays."""
        stall_ns, fetch_ns, *counts = self._sums.tolist()
        found = {"stall_s": stall_ns / 1e9, "fetch_s": fetch_ns / 1e9}
        found |= zip(("layers", "early", "fetched"), counts, strict=True)
        return replace(figures, **{name: getattr(figures, name) + value for name, value in found.items()})


class ReplayedGate:
    """`Gate` for a capture: a context around all layers, whose waits and copies become part of the graph."""

    def __init__(
        self, fetches: LayerFetches, cuda: Any, layers: int, raw: torch.Tensor, pointed: torch.Tensor
    ) -> None:
        self._fetches, self._cuda, self._layers = fetches, cuda, layers
        self._raw, self._pointed = raw, pointed
        self._came: list[Any] = []

    def __enter__(self) -> None:
        self._came = [self._fetches.bring(layer) for layer in range(min(2, self._layers))]

    def enter(self, layer: int) -> None:
        self._fetches.note(layer, _WANTED)
        self._cuda.current_stream(self._raw.device).wait_event(self._came[layer])
        self._fetches.point(layer, self._raw, self._pointed)

    def leave(self, layer: int) -> None:
        self._fetches.note(layer, _LEFT)
        if layer + 2 < self._layers:
            self._came.append(self._fetches.bring(layer + 2))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._fetches.account()


class GpuStream(TorchStream):
    """Implements `BlockStream` on a CUDA device.

    Fetches start only when it is known how the step runs: layer by layer (`enter`) or as a graph (`replay`).
    """

    def __init__(self, lanes: GpuLanes, layers: int, device_blocks: int) -> None:
        super().__init__(lanes, layers, device_blocks)
        self.fetches = LayerFetches(lanes, layers, device_blocks)
        self._waiting: StreamWork | None = None
        self._replayed: Any = None
        """Event at the end of the step's graph."""

    @property
    def tables(self) -> torch.Tensor | None:
        self._begin_now()
        return super().tables

    def enter(self, layer: int, timeout_s: float) -> bool:
        self._begin_now()
        return super().enter(layer, timeout_s)

    def replay(self, graph: Callable[[], _Found]) -> _Found | None:
        """Run the graph with the step's fetches, fetch two layers ahead, and return the graph's result.

        Return None, without running it, if the step fetches nothing."""
        work, self._waiting = self._waiting, None
        if work is None:
            return None
        if self._last is not None:  # the layers fetched ahead for this step
            self._lanes.join(self._last, 0.0)
        self.fetches.fill(work, first=self._first, is_ahead=self._ahead > 0)
        found = graph()
        self._left, self._replayed = self._layers, self._lanes.moment()
        first, second = self._copies_ahead(work)
        pieces = self._upload([*first, *second])
        for parts, places in (pieces[:2], pieces[2:]):
            self._fetch(parts, places, is_ahead=True)
        return found

    def end(self) -> int:
        saved = super().end()
        self._waiting = self._replayed = None
        return saved

    def figures(self) -> StreamFigures:
        return self.fetches.add_to(super().figures())

    def _settle(self) -> int:
        if self._replayed is None:
            return super()._settle()
        self._replayed.synchronize()
        return 2

    def _start(self, work: StreamWork) -> None:
        self._waiting = work

    def _begin_now(self) -> None:
        work, self._waiting = self._waiting, None
        if work is not None:
            super()._start(work)


def open_on_gpu(
    keys: torch.Tensor, values: torch.Tensor, rows: npt.NDArray[np.uint8], layers: int
) -> BlockStream:
    """Return a stream between a CUDA device and `rows`. Raises ConfigError if they cannot be page-locked."""
    cuda: Any = torch.cuda
    runtime = cuda.cudart()
    error = runtime.cudaHostRegister(rows.ctypes.data, rows.nbytes, _PORTABLE_AND_MAPPED)
    if int(error):
        raise ConfigError(
            f"{rows.nbytes >> 20} MiB of host memory cannot be page-locked for the GPU ({error}): lower "
            "host_memory.mb, or set pie.enabled false",
            param="host_memory.mb",
        )

    def release() -> None:
        failed = int(runtime.cudaHostUnregister(rows.ctypes.data))
        if failed:
            _log.warning("host memory stays page-locked until this process ends (%d)", failed)

    lanes = GpuLanes(keys, values, rows, layers, release=release)
    return GpuStream(lanes, layers, len(keys) // layers)
