"""Time on a CUDA device: by its own clock, replayed as one graph. Knows not what is timed."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

TURNS = 5
_REPLAYS = 10
_COPY_BYTES = 1 << 31

Compute = Callable[[], Any]


def graphed(calls: Sequence[Compute]) -> Callable[[], float]:
    """A function that replays all calls as one CUDA graph and returns the seconds of one call."""
    new_stream: Any = torch.cuda.Stream
    stream = new_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in (*calls, *calls):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    return lambda: replayed_s(graph.replay, len(kept))


def replayed_s(replay: Compute, calls: int) -> float:
    """Seconds of one call, by the device's clock."""
    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    replay()
    start.record()
    for _ in range(_REPLAYS):
        replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / _REPLAYS / calls


def copy_bytes_per_s(device: torch.device) -> float:
    """What a copy on the device moves, read and written bytes together: the median of several."""
    source = torch.randn(_COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    measured = [replayed_s(lambda: target.copy_(source), 1) for _ in range(TURNS)]
    return 2 * _COPY_BYTES / statistics.median(measured)
