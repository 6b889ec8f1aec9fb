"""`python -m bench gpu`: memory bandwidth used by decodes, with Llama shapes and random weights.

It measures one layer's attention against PyTorch's, and whole decode steps. The limit is a copy on the
device, bytes read and written together. With `--serve` it measures whole servers instead.
"""

import argparse
import gc
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product

import torch

from bench.kit.context import Context
from bench.kit.outcome import Outcome, Table
from bench.live import gpu_serve
from bench.micro.gpu.attention import measure_attention, measured
from bench.micro.gpu.steps import (
    BLOCK_TOKENS,
    DTYPE,
    MODELS,
    copy_bytes_per_s,
    measure_step,
    random_llama,
    step_bytes,
)
from shared.errors import ConfigError

_COLUMNS = {"us": "µs", "bandwidth_fraction": "of limit", "vs_sdpa": "vs SDPA", "vs_flex": "vs Flex"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the bench's flags."""
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 4096], metavar="TOKENS")
    parser.add_argument("--kernels-only", action="store_true", help="no whole steps: no weights are made")
    parser.add_argument("--serve", action="store_true", help="our stack against bare vllm serve instead")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of --serve [%(default)s]")
    parser.add_argument("--model", default="random-1b", help="of --serve: a folder or a name [%(default)s]")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 32, 128, 256], help="of --serve")
    parser.add_argument("--budget-s", type=float, default=450, help="--serve waits no longer [%(default)s]")


def run(context: Context) -> Outcome:
    """Run the bench. Raises ConfigError without a CUDA device or Triton, or if a context is not whole
    blocks."""
    asked = context.arguments
    device = torch.device("cpu") if asked.serve and asked.device == "cpu" else cuda_device()
    if asked.serve:
        return gpu_serve.run(context)
    models, batches, contexts = asked.models, asked.batches, asked.contexts
    if min(*batches, *contexts) < 1 or any(tokens % BLOCK_TOKENS for tokens in contexts):
        raise ConfigError(f"--batches are positive, --contexts multiples of {BLOCK_TOKENS}")
    if context.quick:
        models, batches, contexts = models[-1:], batches[-1:], contexts[:1]
    found = _Found(copy_bytes_per_s(device))
    _measure_attention(context, found, list(product(models, batches, contexts)), device)
    if not asked.kernels_only:
        for model in models:
            _measure_steps(context, found, model, list(product(batches, contexts[:1])), device)
    properties = torch.cuda.get_device_properties(device)
    return Outcome(
        figures=found.figures,
        failures=found.failures,
        tables=[Table("decode", ("what", "batch", "context", *_COLUMNS.values()), found.rows)],
        notes=[
            f"device: {properties.name}; the limit is a device-to-device copy",
            *dict.fromkeys(found.notes),
        ],
        extra={"device": properties.name},
    )


def cuda_device() -> torch.device:
    """Return the CUDA device. Raises ConfigError if there is none, or no Triton."""
    if not torch.cuda.is_available():
        raise ConfigError("no CUDA device here: `bench gpu` measures on one, and nothing was measured")
    if find_spec("triton") is None:
        raise ConfigError("Triton is not installed (make setup-gpu)")
    return torch.device("cuda", torch.cuda.current_device())


class _Found:
    """Sum of the measurements."""

    def __init__(self, limit_bytes_per_s: float) -> None:
        self.limit_bytes_per_s = limit_bytes_per_s
        self.figures = {"copy_gb_s": limit_bytes_per_s / 1e9}
        self.rows: list[tuple[object, ...]] = []
        self.notes: list[str] = []
        self.failures = 0

    def add(self, context: Context, what: str, batch: int, tokens: int, row: dict[str, float]) -> None:
        context.record({"what": what, "batch": batch, "context_tokens": tokens, **row}, "cells.jsonl")
        self.figures |= {f"{what}_b{batch}_c{tokens}_{name}": value for name, value in row.items()}
        self.rows.append((what, batch, tokens, *(row.get(name, "") for name in _COLUMNS)))


def _measure_attention(
    context: Context, found: _Found, cells: Sequence[tuple[str, int, int]], device: torch.device
) -> None:
    with context.progress("attention", len(cells)) as progress:
        for model, batch, tokens in cells:
            progress.advance(0, f"{model} batch {batch} context {tokens}")
            cell = measure_attention(MODELS[model], batch, tokens, device)
            row = measured(MODELS[model].kv_bytes(batch, tokens), cell.seconds, found.limit_bytes_per_s)
            found.add(context, f"{model}_attention", batch, tokens, row)
            found.failures += cell.wrong
            found.notes += cell.notes
            progress.advance()


def _measure_steps(
    context: Context, found: _Found, model: str, cells: Sequence[tuple[int, int]], device: torch.device
) -> None:
    shape = MODELS[model]
    with context.progress(f"steps of {model}", len(cells)) as progress:
        module = random_llama(shape, max(tokens for _, tokens in cells), DTYPE, device)
        for batch, tokens in cells:
            progress.advance(0, f"batch {batch} context {tokens}")
            seconds = measure_step(module, shape, batch, tokens, device)
            row = measured(
                step_bytes(module, shape, batch, tokens), {"ours": seconds}, found.limit_bytes_per_s
            )
            found.add(context, f"{model}_step", batch, tokens, row)
            gc.collect()
            torch.cuda.empty_cache()
            progress.advance()
