"""`python -m bench tiers`: how much longer a step is while blocks are copied to or from the host.

One engine runs under the worker's core and prefix cache in one thread, with the copying threads beside it.
In a `demote` window each running sequence needs a new block, free or evicted. In a `load` window a prompt
arrives whose prefix is stored, on the device or on the host. The result is the longest step of a window.
"""

import gc
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from time import perf_counter

import torch

from bench.kit.context import Context
from bench.kit.models import checkpoint
from bench.kit.outcome import Outcome, Table
from bench.kit.stats import alternate, interval, median_of_ratios
from services.worker.core.prefixes import Prefixes
from services.worker.core.reports import Identity
from services.worker.core.sequences import SequenceLimits, SequenceTable
from services.worker.core.settings import PrefixCacheConfig
from services.worker.core.steps import StepCore
from services.worker.engine.engine import TorchEngine, warm_up
from services.worker.engine.loading import load
from services.worker.engine_thread import row_of
from services.worker.kv.store import open_store
from services.worker.kv.transfers import TransferEngine
from shared.blocks import BlockHash, chain, root
from shared.messages.plans import BatchPlan, Decode, PrefillChunk
from shared.messages.sequence import FinishReason, Sampling, SequenceRef, SequenceSpec, pack_tokens

_EVER_S = 1e9
_STORED_BLOCKS = 128
"""Device blocks for stored prefixes, beside those of running sequences."""
_LOAD_STEPS, _ARRIVES_AT = 24, 4
"""Steps of a window in which a prompt arrives, and its step."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--model", default="random-100m", help="folder, or random-100m [%(default)s]")
    parser.add_argument("--block-tokens", type=int, default=64, help="[%(default)s: 2 MiB of random-100m]")
    parser.add_argument("--batch", type=int, default=16, help="sequences that decode [%(default)s]")
    parser.add_argument("--hit-blocks", type=int, default=32, help="of the prompt that arrives [%(default)s]")
    parser.add_argument("--turns", type=int, default=9, help="of each comparison [%(default)s]")


@dataclass
class Window:
    """Durations of consecutive steps, in seconds."""

    steps_s: list[float] = field(default_factory=list)

    @property
    def longest_s(self) -> float:
        return max(self.steps_s)

    @property
    def median_s(self) -> float:
        return median(self.steps_s)


def run(context: Context) -> Outcome:
    """Run the bench. Raises ConfigError for a model that cannot be loaded."""
    flags = context.arguments
    turns = 2 if context.quick else flags.turns
    torch.set_num_threads(1)
    folder = str(checkpoint(flags.model))
    worker = BusyWorker(folder, flags.block_tokens, flags.batch, flags.hit_blocks, turns)
    figures: dict[str, float] = {}
    rows: list[Sequence[object]] = []
    try:
        kinds: list[tuple[str, Callable[[], Window], Callable[[], Window]]] = [
            ("load", lambda: worker.load_window(is_near=False), lambda: worker.load_window(is_near=True)),
            ("demote", lambda: worker.border(is_full=True), lambda: worker.border(is_full=False)),
        ]
        with context.progress("turns", 2 * turns) as progress:
            for name, during, without in kinds:
                during()  # warm-up
                with_copies, alone = alternate((during, without), turns)
                progress.advance(turns)
                rows.append((name, *_compare(name, with_copies, alone, figures)))
        counts = worker.store.cache.counts
        notes = [
            f"{worker.store.record_bytes / 2**20:.2f} MiB a block; {counts['hits_host']} came from the host, "
            f"{counts['evicted_device']} left the device"
        ]
    finally:
        worker.store.close(10.0)
    columns = ("while", "longest ms", "longest ms without", "ratio", "low", "high", "median step ratio")
    return Outcome(figures, 0, [Table("steps", columns, rows)], notes)


def _compare(
    name: str, during: Sequence[Window], without: Sequence[Window], figures: dict[str, float]
) -> tuple[float, ...]:
    longest = [window.longest_s for window in during], [window.longest_s for window in without]
    ratio = median_of_ratios(*longest)
    low, high = interval(*longest, median_of_ratios)
    steps = median_of_ratios([one.median_s for one in during], [one.median_s for one in without])
    figures[f"longest_step_ratio_{name}"] = ratio
    figures[f"longest_step_ratio_{name}_low"] = low
    figures[f"longest_step_ratio_{name}_high"] = high
    figures[f"median_step_ratio_{name}"] = steps
    figures[f"longest_step_ms_{name}"] = 1e3 * median(longest[0])
    figures[f"longest_step_ms_{name}_without"] = 1e3 * median(longest[1])
    figures[f"worst_step_ms_{name}"] = 1e3 * max(longest[0])
    return 1e3 * median(longest[0]), 1e3 * median(longest[1]), ratio, low, high, steps


class BusyWorker:
    """An engine, its prefix cache and its core, with `batch` sequences that decode all the time."""

    def __init__(self, folder: str, block_tokens: int, batch: int, hit_blocks: int, turns: int) -> None:
        model = load(folder, dtype="float32", device="cpu")
        windows = 2 * (turns + 1) + 2
        tokens = 2 * block_tokens + windows * max(block_tokens, _LOAD_STEPS) + windows * _LOAD_STEPS
        self._size, self._hit_blocks = block_tokens, hit_blocks
        blocks = batch * -(-tokens // block_tokens) + max(_STORED_BLOCKS, 2 * hit_blocks)
        self.engine = TorchEngine(model, kv_blocks=blocks, block_tokens=block_tokens)
        warm_up(self.engine)
        config, transfers = PrefixCacheConfig(), TransferEngine(lambda: None)
        self.store = open_store(config, self.engine, "bench", transfers, host_blocks=2 * blocks)
        self._prefixes = Prefixes(self.store.cache, self.store.fingerprint)
        limits = SequenceLimits(self.engine.max_positions, self.engine.vocabulary, _EVER_S, _EVER_S)
        self._table = SequenceTable(self.store.cache, limits, self._prefixes)
        self._core = StepCore(Identity("bench", 1, "bench", self.engine.max_positions, "here"), self._table)
        self._numbers, self._plans = count(1), count(1)
        self._ended_s = perf_counter()
        self._refs: list[SequenceRef] = []
        self._refs = [self._start(self._text(block_tokens // 2), tokens) for _ in range(batch)]
        gc.collect()
        gc.freeze()

    def border(self, *, is_full: bool) -> Window:
        """Run as many steps as a block has tokens, so that each sequence needs one new block."""
        self._empty()
        if is_full:
            self._fill()
        return self._steps(self._size)

    def load_window(self, *, is_near: bool) -> Window:
        """Run some steps, in one of which a prompt with a stored prefix arrives."""
        text = self._text(self._hit_blocks * self._size + 1)
        self._empty()
        self._keep(self._names(text))
        if not is_near:
            self._empty()
        window = self._steps(_ARRIVES_AT)
        ref = self._name()
        blocks = self._hit_blocks + 1
        chunk = PrefillChunk(ref=ref, first_token=0, end_token=len(text), allocated_blocks=blocks)
        window.steps_s.append(self._step(chunk, self._spec(ref, text, 2)))
        window.steps_s += self._steps(_LOAD_STEPS - _ARRIVES_AT).steps_s
        for _ in range(1000):
            held = self._table.find(ref)
            if held is None or held.generated_tokens:
                break
            self._step()
        self._table.cancel(ref, FinishReason.CANCELLED, 0.0)
        return window

    def _steps(self, steps: int) -> Window:
        self._ended_s = perf_counter()
        return Window([self._step() for _ in range(steps)])

    def _step(self, chunk: PrefillChunk | None = None, start: SequenceSpec | None = None) -> float:
        """Run one decode step, with a chunk if given; return the seconds since the previous step."""
        plan = BatchPlan(
            epoch=1,
            seq=next(self._plans),
            starts=() if start is None else (start,),
            prefills=() if chunk is None else (chunk,),
            decodes=tuple(Decode(ref=ref, allocated_blocks=self._blocks_of(ref)) for ref in self._refs),
            valid_for_s=_EVER_S,
        )
        self._core.on_plan(plan, 0.0)
        self.store.transfers.settle()
        self._prefixes.work_ahead()
        work, _ = self._core.begin_step(0.0)
        if work is not None:
            sampled = self.engine.step([row_of(item) for item in work.items])
            self._core.finish_step(work, sampled, 0.0, 0.0)
        ended_s = perf_counter()
        took_s, self._ended_s = ended_s - self._ended_s, ended_s
        return took_s

    def _blocks_of(self, ref: SequenceRef) -> int:
        held = self._table.find(ref)
        assert held is not None
        return -(-len(held.tokens) // self._size)

    def _start(self, text: list[int], max_tokens: int) -> SequenceRef:
        ref = self._name()
        blocks = -(-len(text) // self._size)
        chunk = PrefillChunk(ref=ref, first_token=0, end_token=len(text), allocated_blocks=blocks)
        self._step(chunk, self._spec(ref, text, max_tokens))
        return ref

    def _name(self) -> SequenceRef:
        return SequenceRef(request_id=f"req_{next(self._numbers)}", choice=0, attempt=1)

    def _text(self, tokens: int) -> list[int]:
        """Return a text with a unique prefix."""
        number = next(self._numbers)
        vocabulary = self.engine.vocabulary - 3
        return [3 + (number * 7919 + at * (number + 31)) % vocabulary for at in range(tokens)]

    def _spec(self, ref: SequenceRef, text: list[int], max_tokens: int) -> SequenceSpec:
        sampling = Sampling(seed=0, max_tokens=max_tokens, temperature=0.0)
        prompt = pack_tokens(text)
        return SequenceSpec(
            ref=ref, gateway_id="bench", gateway_incarnation=1, prompt=prompt, sampling=sampling
        )

    def _names(self, text: list[int]) -> list[BlockHash]:
        return chain(root(self.store.fingerprint, b""), pack_tokens(text), self._size)

    def _keep(self, names: Sequence[BlockHash]) -> None:
        """Store blocks with these names on the device, whatever they contain."""
        blocks = self.store.cache.allocate(len(names))
        for at, (block, name) in enumerate(zip(blocks, names, strict=True)):
            self.store.cache.publish(block, name, names[at - 1] if at else None)
        self.store.cache.release(blocks)

    def _empty(self) -> None:
        """Evict all unused blocks from the device and finish all copies."""
        cache = self.store.cache
        cache.release(cache.allocate(cache.free_blocks + cache.evictable_blocks))
        self.store.transfers.settle()

    def _fill(self) -> None:
        """Fill all free device blocks with prefixes that the host does not have."""
        cache = self.store.cache
        while cache.free_blocks:
            self._keep(self._names(self._text(min(8, cache.free_blocks) * self._size)))
