"""Sides of the live bench: one engine each, on the same device bytes.

`recompute` and `swap` preempt sequences that do not fit, and recompute them or keep their KV in host memory.
`swap` uses the prefix cache's host tier, block by block, at the link's speed, in the engine's time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random
from statistics import fmean

from bench.kit.models import RANDOM_SHAPES, TINY_CHAT
from bench.live.pie.loop import Loop, Request
from models.train_tiny_chat.chat import END, Chat
from models.train_tiny_chat.stories import story_chat
from models.train_tiny_chat.templates import template_chat
from services.predictor.samples import load_tokenizer
from services.scheduler.policy.contract import PolicySettings
from services.worker.core.settings import PieSettings, PrefixCacheConfig
from services.worker.engine.engine import TorchEngine, warm_up
from services.worker.engine.loading import load
from services.worker.kv.store import KvStore, open_store
from services.worker.kv.transfers import TransferEngine
from services.worker.pie.core.sizes import slot_blocks

_STORY_SHARE = 0.6
MOST_TOKENS = 256
"""Answer limit."""
_LEAST_TOKENS = 8


class Workload:
    """Endless requests, the same for every side in the same order."""

    def __init__(self, model: str, seed: int) -> None:
        self._seed = seed
        self._tokenizer = load_tokenizer(TINY_CHAT)
        self._end = self._encode(END)
        self._is_random = Path(model).name in RANDOM_SHAPES

    def requests(self, spread: int = 0) -> Iterator[Request]:
        """Yield requests from the start. The first `spread`, which start together, end early at random."""
        early = Random(f"pie/{self._seed}/spread")
        for number, request in enumerate(self._whole()):
            share = early.random() if number < spread else 1.0
            yield replace(request, max_tokens=max(1, int(share * request.max_tokens)))

    def _whole(self) -> Iterator[Request]:
        for chat in _drawn(Random(f"pie/{self._seed}")):
            prompt, length = self._encode(chat.prompt()), len(self._encode(chat.answer() + END))
            if self._is_random:
                yield Request(prompt, max(_LEAST_TOKENS, min(length, MOST_TOKENS)))
            else:
                yield Request(prompt, MOST_TOKENS, self._end)

    def mean_tokens(self, requests: int = 200) -> float:
        """Return the mean tokens of prompt and answer in the texts."""
        total = 0
        for chat in islice(_drawn(Random(f"pie/{self._seed}")), requests):
            total += len(self._encode(chat.prompt()))
            total += min(MOST_TOKENS, len(self._encode(chat.answer() + END)))
        return total / requests

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _drawn(draw: Random) -> Iterator[Chat]:
    while True:
        yield story_chat(draw) if draw.random() < _STORY_SHARE else template_chat(draw)


BLOCK_TOKENS = 16
HOST_MB = 2048
MOST_SEQUENCES = 64
_LONGEST_S = 120.0
_STILL_WINDOWS = 8
"""The controller waits for four and judges four before it keeps a raise."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A side. With `fifo_layers` None, the length is found while running."""

    name: str
    fifo_layers: int | None = 0
    is_swapping: bool = False
    is_ample: bool = False

    @property
    def has_pie(self) -> bool:
        return self.fifo_layers != 0


RECOMPUTE = Kind("recompute")
SWAP = Kind("swap", is_swapping=True)
AUTO = Kind("auto", None)
AMPLE = Kind("ample", is_ample=True)


def fixed(fifo_layers: int) -> Kind:
    return Kind(f"fixed {fifo_layers}", fifo_layers)


@dataclass(frozen=True, slots=True)
class Ground:
    """Settings shared by all sides. `bandwidth` is the link's, in bytes per second and direction."""

    model: Path
    device_blocks: int
    bandwidth: float
    clients: int
    window_iterations: int = 32
    ramp_s: float = 0.0
    """Time within which the clients join one after the other."""
    least_step_s: float = 0.0


class EngineSide:
    """One engine that serves its clients. Must be closed."""

    def __init__(self, kind: Kind, ground: Ground, requests: Iterator[Request]) -> None:
        self.kind, self.clients = kind, ground.clients
        self._window_iterations = ground.window_iterations
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
            least_step_s=ground.least_step_s,
        )

    @property
    def stall_s(self) -> tuple[float, float]:
        """Seconds stalled and computed since the start."""
        if self.engine.pie is None:
            return 0.0, 0.0
        meter = self.engine.pie.meter
        return meter.stall_s, meter.compute_s

    @property
    def fifo_layers(self) -> int:
        return 0 if self.engine.pie is None else self.engine.pie.expansion().fifo_layers

    def settle(self, still_s: float, most_s: float, answers: float = 2.0) -> None:
        """Run until the queue kept its length for `still_s`, then for `answers` mean answer durations.

        A length that is searched for has to be kept for `_STILL_WINDOWS`, too. The first part takes at most
        `most_s`.
        """
        ends_s, look_s = self.loop.ran_s + most_s, min(1.0, still_s / 4)
        length, since_s = self.fifo_layers, self.loop.ran_s
        iterations = 0 if self.kind.fifo_layers is not None else _STILL_WINDOWS * self._window_iterations
        since = self.loop.steps
        while self.loop.ran_s < ends_s and (
            self.loop.ran_s < since_s + still_s or self.loop.steps < since + iterations
        ):
            self.loop.run(look_s)
            if self.fifo_layers != length:
                length, since_s, since = self.fifo_layers, self.loop.ran_s, self.loop.steps
        self.loop.run(answers * self.mean_answer_s)

    @property
    def mean_answer_s(self) -> float:
        """Mean duration of the latest answers, as many as there are clients."""
        latest = self.loop.answers[-self.clients :]
        return fmean(each.ended_s - each.sent_s for each in latest) if latest else 0.0

    def serve(self, answers: int) -> None:
        """Run until `answers` more are answered, or for at most `_LONGEST_S`."""
        wanted = len(self.loop.answers) + answers
        self.loop.run(_LONGEST_S, until=lambda: len(self.loop.answers) >= wanted)

    def set_background(self, bytes_s: float) -> None:
        """Set other traffic on the link in bytes per second and direction."""
        if self.engine.pie is not None:
            self.engine.pie.set_background(bytes_s)

    def close(self) -> None:
        if self.engine.pie is not None:
            self.engine.pie.close()
        if self._store is not None:
            self._store.close(5.0)


def _engine(kind: Kind, ground: Ground) -> TorchEngine:
    pie = PieSettings(
        enabled=kind.has_pie,
        expansion="auto" if kind.fifo_layers is None else "fixed",
        fifo_layers=kind.fifo_layers or 0,
        bandwidth_limit=ground.bandwidth,
        window_iterations=ground.window_iterations,
    )
    model = load(str(ground.model), dtype="float32", device="cpu")
    layers = len(model.layers)
    ample_blocks = slot_blocks(layers, layers - 1, ground.device_blocks)
    engine = TorchEngine(
        model,
        kv_blocks=ample_blocks if kind.is_ample else ground.device_blocks,
        block_tokens=BLOCK_TOKENS,
        release=True,
        pie=pie,
        pie_bytes=HOST_MB << 20,
        cache_blocks=(HOST_MB << 20) // model.block_bytes(BLOCK_TOKENS),
    )
    warm_up(engine)
    return engine


def _store(engine: TorchEngine, ground: Ground) -> KvStore:
    config, transfers = PrefixCacheConfig(host_bytes_per_s=ground.bandwidth), TransferEngine(lambda: None)
    host_blocks = (HOST_MB << 20) // engine.records().record_bytes
    return open_store(config, engine, "bench", transfers, host_blocks=host_blocks)
