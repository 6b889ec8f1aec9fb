"""Pie's transfers on a GPU: pinned host memory, one CUDA stream per direction, completion by events.

Copies wait for the computation submitted before them, never the other way round: a layer's completion is
seen by `poll` before it is computed. The host is held to `run_ahead_layers` layers before the device, so
that decisions are made close to when the device gets there; a wait on the host is therefore an upper bound
of the device's stall.
"""

# mypy: allow-untyped-calls
from collections import deque
from dataclasses import dataclass

import torch

from services.worker.pie.copier import Done
from services.worker.pie.memory import LayerMemory
from services.worker.pie.swap import Direction, Transfer


@dataclass(frozen=True, slots=True)
class _Flight:
    transfer: Transfer
    sent_bytes: int
    began: torch.cuda.Event
    ended: torch.cuda.Event


class StreamCopier:
    """Implements `services.worker.pie.copier.Copier` for a CUDA device; used by the engine's thread alone."""

    poll_interval_s = 50e-6

    def __init__(self, memory: LayerMemory, run_ahead_layers: int = 2) -> None:
        self._memory, self._run_ahead_layers = memory, run_ahead_layers
        self._streams = {direction: torch.cuda.Stream(memory.device) for direction in Direction}
        self._flights: dict[Direction, _Flight] = {}
        self._computed: deque[torch.cuda.Event] = deque()
        self._done: Done | None = None

    def start(self, done: Done) -> None:
        self._done = done

    def submit(self, transfer: Transfer, used: torch.Tensor) -> None:
        stream = self._streams[transfer.direction]
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if self._computed:
            stream.wait_event(self._computed[-1])
        with torch.cuda.stream(stream):
            began.record(stream)
            if transfer.direction is Direction.OUT:
                sent = self._memory.copy_out(transfer.device_slot, transfer.host_slot, used, _unpaced)
            else:
                sent = self._memory.copy_in(transfer.device_slot, transfer.host_slot, _unpaced)
            ended.record(stream)
        self._flights[transfer.direction] = _Flight(transfer, sent, began, ended)

    def before_layer(self) -> None:
        """Wait until the device is no more than `run_ahead_layers` layers behind."""
        while len(self._computed) > self._run_ahead_layers:
            self._computed.popleft().synchronize()

    def after_layer(self) -> None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._memory.device))
        self._computed.append(event)

    def poll(self) -> None:
        for direction, flight in list(self._flights.items()):
            if flight.ended.query():
                del self._flights[direction]
                assert self._done is not None
                took_s = flight.began.elapsed_time(flight.ended) / 1e3
                self._done(flight.transfer, flight.sent_bytes, took_s, None)

    def close(self, deadline_s: float) -> bool:
        """Wait for what was submitted; the deadline is the driver's."""
        for stream in self._streams.values():
            stream.synchronize()
        return True


def _unpaced(sent_bytes: int) -> None:
    """The link is real."""
