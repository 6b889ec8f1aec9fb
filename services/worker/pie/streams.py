"""Pie's transfers on a GPU: pinned host memory, one CUDA stream per direction, completion by events.

Copies wait for the computation submitted before them, never the other way round: a layer's completion is
seen by `poll` before it is computed. The host is held to `run_ahead_layers` layers before the device, so
that decisions are made close to when the device gets there, and sees completions while it is held; a wait on
the host is therefore an upper bound of the device's stall.
"""

import time
from collections import deque
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from services.worker.pie.copier import SwapDone
from services.worker.pie.core.copies import Runs
from services.worker.pie.core.swap import Direction, Transfer
from services.worker.pie.memory import LayerMemory
from shared.clock import Clock, monotonic_s
from shared.errors import InternalError

_POLL_INTERVAL_S = 20e-6
"""Of a layer that takes some hundred microseconds."""


@dataclass(frozen=True, slots=True)
class _Flight:
    transfer: Transfer
    sent_bytes: int
    began: Any
    ended: Any


class StreamCopier:
    """Implements `services.worker.pie.copier.Copier` for a CUDA device; used by the engine's thread alone.

    `cuda` is `torch.cuda`: streams and events as it has them. A device that does not get on with its layers
    for `patience_s` is an error.
    """

    poll_interval_s = _POLL_INTERVAL_S

    def __init__(
        self,
        memory: LayerMemory,
        run_ahead_layers: int = 2,
        *,
        cuda: ModuleType | Any = torch.cuda,
        clock: Clock = monotonic_s,
        patience_s: float = 30.0,
    ) -> None:
        self._memory, self._run_ahead_layers, self._cuda = memory, run_ahead_layers, cuda
        self._clock, self._patience_s = clock, patience_s
        self._streams = {direction: cuda.Stream(memory.device) for direction in Direction}
        self._flights: dict[Direction, _Flight] = {}
        self._computed: deque[Any] = deque()
        """An event behind each computation that is not known to be over."""
        self._done: SwapDone | None = None

    def start(self, done: SwapDone) -> None:
        self._done = done

    def submit(self, transfer: Transfer, runs: Runs) -> None:
        stream = self._streams[transfer.direction]
        began, ended = (self._cuda.Event(enable_timing=True) for _ in range(2))
        if self._computed:
            stream.wait_event(self._computed[-1])
        with self._cuda.stream(stream):
            began.record(stream)
            copy = self._memory.copy_out if transfer.direction is Direction.OUT else self._memory.copy_in
            sent = copy(transfer.device_slot, transfer.host_slot, runs, _unpaced)
            ended.record(stream)
        self._flights[transfer.direction] = _Flight(transfer, sent, began, ended)

    def before_layer(self) -> None:
        """Wait until the device is no more than `run_ahead_layers` layers behind; transfers go on."""
        deadline_s = self._clock() + self._patience_s
        while len(self._computed) > self._run_ahead_layers:
            if self._computed[0].query():
                self._computed.popleft()
                continue
            if self._clock() > deadline_s:
                raise InternalError(f"the device did not compute a layer within {self._patience_s:g} s")
            self.poll()
            time.sleep(_POLL_INTERVAL_S)

    def after_layer(self) -> None:
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self._memory.device))
        self._computed.append(event)

    def poll(self) -> None:
        for direction, flight in list(self._flights.items()):
            if flight.ended.query():
                del self._flights[direction]
                assert self._done is not None
                took_s = flight.began.elapsed_time(flight.ended) / 1e3
                self._done(flight.transfer, flight.sent_bytes, took_s, None)

    def close(self, deadline_s: float) -> bool:
        """Wait for what was submitted; False when that took longer."""
        ends_s = self._clock() + deadline_s
        while any(not stream.query() for stream in self._streams.values()):
            if self._clock() > ends_s:
                return False
            time.sleep(_POLL_INTERVAL_S)
        return True


def _unpaced(sent_bytes: int) -> None:
    """The link is real."""
