"""`python -m bench step`: milliseconds of one decode step of the engine alone, on one thread, no server.

For each batch and context it measures `engine.step` (packing, forward, sampling) and its forward pass. It
also measures the worker's step without the model (`host_ms`), from a ready plan to the sent frames.
`split_ms` is the extra cost of a step in which two sequences have borrowed blocks. All are CPU time of the
calling thread, which other processes hardly affect. The first two are the least of many repetitions, the
others medians.
"""

from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from itertools import product
from statistics import median
from time import thread_time
from typing import Any

import torch

from bench.kit.context import Context
from bench.kit.models import checkpoint
from bench.kit.outcome import Outcome, Table
from bench.micro.engine_host import thread_us_per_row
from services.worker.core.sampling import SamplePoint
from services.worker.engine.contract import Row
from services.worker.engine.engine import TorchEngine
from services.worker.engine.loading import load
from services.worker.engine.partition import Homes, split
from services.worker.engine.spans import Span, pack
from services.worker.kv.core.block_pool import block_table
from shared.messages.sequence import Sampling

_BLOCK_TOKENS = 16
_REPEATS = 40
_QUICK_REPEATS = 8
_HOST = {"64x1k": (64, 1024), "256x8k": (256, 8192)}
"""(batch, context tokens) by name. Quick runs skip those above their batches."""
_WARM_STEPS = 3
_SPLIT_BATCHES = (64, 256)
_SPLIT_CONTEXT, _BORROWERS, _BORROWED_BLOCKS = 1024, 2, 16
"""In each of these batches two sequences borrow their last 16 blocks."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--model", default="models/tiny_chat", help="folder, or random-100m [%(default)s]")
    parser.add_argument("--attention", choices=("auto", "native", "torch"), default="auto")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 64])
    parser.add_argument("--contexts", nargs="+", type=int, default=[100, 500], metavar="TOKENS")
    parser.add_argument("--temperature", type=float, default=0.0, help="[%(default)s]")
    parser.add_argument("--top-p", type=float, default=1.0, help="[%(default)s]")


def run(context: Context) -> Outcome:
    """Run the bench. Raises ConfigError for an unloadable model, or --attention native without a compiler."""
    flags = context.arguments
    torch.set_num_threads(1)
    model = load(str(checkpoint(flags.model)), dtype="float32", device="cpu")
    blocks = max(flags.batches) * _blocks(max(flags.contexts))
    engine = Timed(model, kv_blocks=blocks, block_tokens=_BLOCK_TOKENS, attention=flags.attention)
    sampling = Sampling(seed=0, max_tokens=1, temperature=flags.temperature, top_p=flags.top_p)
    repeats = _QUICK_REPEATS if context.quick else _REPEATS
    figures: dict[str, float] = {}
    table: list[Sequence[object]] = []
    cells = list(product(flags.batches, flags.contexts))
    with context.progress("steps", len(cells)) as progress:
        for batch, tokens in cells:
            step_ms, forward_ms = engine.measure(decode_rows(batch, tokens, sampling), repeats)
            figures[f"step_ms_b{batch}_c{tokens}"] = step_ms
            figures[f"forward_ms_b{batch}_c{tokens}"] = forward_ms
            table.append((batch, tokens, step_ms, forward_ms))
            progress.advance()
    host: list[Sequence[object]] = []
    for name, (batch, tokens) in _HOST.items():
        if not (context.quick and batch > max(flags.batches)):
            us_per_row = thread_us_per_row(model, batch, context_tokens=tokens)
            figures[f"host_ms_{name}"] = us_per_row * batch / 1e3
            host.append((batch, tokens, figures[f"host_ms_{name}"]))
    cut: list[Sequence[object]] = []
    for batch in _SPLIT_BATCHES:
        took_ms = split_ms(batch, _SPLIT_CONTEXT, _BLOCK_TOKENS, _BORROWERS, _BORROWED_BLOCKS, repeats)
        figures[f"split_ms_{batch}"] = took_ms
        cut.append((batch, _SPLIT_CONTEXT, took_ms))
    columns = ("batch", "context", "step ms", "forward ms")
    tables = [
        Table("one decode step", columns, table),
        Table("one step of a worker, without the model", ("batch", "context", "ms"), host),
        Table("a step cut into parts, two rows with borrowed blocks", ("batch", "context", "ms"), cut),
    ]
    notes = ["CPU time; steps: least of the repetitions; host and split: median"]
    return Outcome(figures, 0, tables, notes)


def split_ms(
    batch: int, context_tokens: int, block_tokens: int, borrowers: int, borrowed_blocks: int, steps: int
) -> float:
    """Return the median CPU milliseconds to split a step of `batch` decodes. The first `borrowers`
    sequences have their last `borrowed_blocks` blocks at one creditor."""
    each = -(-(context_tokens + 1) // block_tokens)
    homes, spans, there = Homes(batch * each), [], 0
    for row in range(batch):
        blocks = list(range(row * each, (row + 1) * each))
        if row < borrowers:
            places = range(there, there := there + borrowed_blocks)
            blocks[-borrowed_blocks:] = [batch * each + place for place in places]
            homes.place(blocks[-borrowed_blocks:], 1, places)
        spans.append(Span(context_tokens, 1, block_table(blocks)))
    packed, took_s = pack(spans, block_tokens), []
    for _ in range(_WARM_STEPS + steps):
        began_s = thread_time()
        split(packed, homes, block_tokens)
        took_s.append(thread_time() - began_s)
    return 1e3 * median(took_s[_WARM_STEPS:])


def decode_rows(batch: int, context_tokens: int, sampling: Sampling) -> list[Row]:
    """Return one decode token of each of `batch` sequences at position `context_tokens`, with separate
    blocks."""
    blocks = _blocks(context_tokens)
    text = list(range(context_tokens + 1))
    return [
        Row(
            text[-1:],
            context_tokens,
            list(range(row * blocks, (row + 1) * blocks)),
            SamplePoint(sampling, 0, row, text),
        )
        for row in range(batch)
    ]


class Timed(TorchEngine):
    """An engine that measures its forward passes."""

    def __init__(self, model: Any, **settings: Any) -> None:
        super().__init__(model, **settings)
        self._forward = self._clocked(self._forward)
        self.forward_s = 0.0

    def measure(self, rows: Sequence[Row], repeats: int) -> tuple[float, float]:
        """Return the least milliseconds of a step and of a forward pass."""
        steps, forwards = [], []
        for _ in range(repeats):
            began_s = thread_time()
            self.step(rows)
            steps.append(thread_time() - began_s)
            forwards.append(self.forward_s)
        return min(steps) * 1e3, min(forwards) * 1e3

    def _clocked(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*inputs: torch.Tensor) -> Any:
            began_s = thread_time()
            result = forward(*inputs)
            self.forward_s = thread_time() - began_s
            return result

        return run


def _blocks(context_tokens: int) -> int:
    return -(-(context_tokens + 1) // _BLOCK_TOKENS)
