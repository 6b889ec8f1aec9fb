"""The sides of the live bench: how one engine gets by on the same device bytes. Measures nothing.

`recompute` and `swap` hold what fits and preempt the rest: to be computed again, or with its KV in host
memory (the prefix cache's host tier, block by block, its copies as fast as the link, in the engine's time).
`synchronous` is Pie's store without the overlap, as FlexGen copies; `fixed` and `auto` are Pie.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from bench.live.pie.loop import Loop, Request
from services.scheduler.policy.contract import PolicySettings
from services.worker.engine.engine import TorchEngine, warm_up
from services.worker.engine.loading import load
from services.worker.kv.core.settings import PrefixCacheConfig
from services.worker.kv.store import KvStore, open_store
from services.worker.pie.settings import PieSettings

BLOCK_TOKENS = 16
HOST_MB = 2048
MOST_SEQUENCES = 64
_LONGEST_S = 120.0


@dataclass(frozen=True, slots=True)
class Kind:
    """`fifo_layers` None: found while running."""

    name: str
    fifo_layers: int | None = 0
    is_swapping: bool = False
    overlaps: bool = True

    @property
    def has_pie(self) -> bool:
        return self.fifo_layers != 0


RECOMPUTE = Kind("recompute")
SWAP = Kind("swap", is_swapping=True)
AUTO = Kind("auto", None)


def fixed(fifo_layers: int) -> Kind:
    return Kind(f"fixed {fifo_layers}", fifo_layers)


def synchronous(fifo_layers: int) -> Kind:
    return Kind(f"synchronous {fifo_layers}", fifo_layers, overlaps=False)


@dataclass(frozen=True, slots=True)
class Ground:
    """What all sides have in common. `bandwidth` is the link's, bytes per second in each direction."""

    model: Path
    device_blocks: int
    bandwidth: float
    clients: int
    window_iterations: int = 32
    ramp_s: float = 0.0
    """In which the clients join, one after the other."""


class EngineSide:
    """One engine that serves its clients; to be closed."""

    def __init__(self, kind: Kind, ground: Ground, requests: Iterator[Request]) -> None:
        self.kind, self.clients = kind, ground.clients
        self.engine = _engine(kind, ground)
        self._store = _store(self.engine, ground) if kind.is_swapping else None
        settings = PolicySettings(max_batch_sequences=MOST_SEQUENCES, max_steps=1)
        self.loop = Loop(
            self.engine,
            requests,
            clients=ground.clients,
            settings=settings,
            store=self._store,
            ramp_s=ground.ramp_s,
        )

    @property
    def stall_s(self) -> tuple[float, float]:
        """Waited for KV, computed; seconds since the start. Without overlap every copy is a wait."""
        if self.engine.pie is None:
            return 0.0, 0.0
        meter = self.engine.pie.store.meter
        if not self.kind.overlaps:
            return meter.copying_s, meter.compute_s - meter.copying_s
        return sum(meter.stall_s), meter.compute_s

    @property
    def fifo_layers(self) -> int:
        return 0 if self.engine.pie is None else self.engine.pie.growth.expansion().fifo_layers

    def settle(self, still_s: float, most_s: float, answers: float = 2.0) -> None:
        """Until the queue has kept its length for `still_s`, then for so many mean answers' durations.

        The same for every side; the first part takes `most_s` at most.
        """
        ends_s, look_s = self.loop.ran_s + most_s, min(1.0, still_s / 4)
        length, since_s = self.fifo_layers, self.loop.ran_s
        while self.loop.ran_s < min(ends_s, since_s + still_s):
            self.loop.run(look_s)
            if self.fifo_layers != length:
                length, since_s = self.fifo_layers, self.loop.ran_s
        self.loop.run(answers * self.mean_answer_s)

    @property
    def mean_answer_s(self) -> float:
        """From sending a request to the end of its answer, of as many latest ones as there are clients."""
        latest = self.loop.answers[-self.clients :]
        return fmean(each.ended_s - each.sent_s for each in latest) if latest else 0.0

    def serve(self, answers: int) -> None:
        """Until so many more are answered, or for a long time."""
        wanted = len(self.loop.answers) + answers
        self.loop.run(_LONGEST_S, until=lambda: len(self.loop.answers) >= wanted)

    def set_background(self, bytes_s: float) -> None:
        """What others send over the link, in each direction, from now on."""
        if self.engine.pie is not None:
            for link in self.engine.pie.links.values():
                link.background_bytes_s = bytes_s

    def close(self) -> None:
        if self.engine.pie is not None:
            self.engine.pie.store.close(5.0)
        if self._store is not None:
            self._store.close(5.0)


def _engine(kind: Kind, ground: Ground) -> TorchEngine:
    pie = PieSettings(
        enabled=kind.has_pie,
        expansion="auto" if kind.fifo_layers is None else "fixed",
        fifo_layers=kind.fifo_layers or 0,
        host_mb=HOST_MB,
        bandwidth_limit=ground.bandwidth,
        overlap=kind.overlaps,
        window_iterations=ground.window_iterations,
    )
    engine = TorchEngine(
        load(str(ground.model), dtype="float32", device="cpu"),
        kv_blocks=ground.device_blocks,
        block_tokens=BLOCK_TOKENS,
        release=True,
        pie=pie,
    )
    warm_up(engine)
    return engine


def _store(engine: TorchEngine, ground: Ground) -> KvStore:
    cache = PrefixCacheConfig(host_mb=HOST_MB, host_bytes_per_s=ground.bandwidth)
    return open_store(cache, engine, "bench", lambda: None)
