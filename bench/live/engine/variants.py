"""`python -m bench vllm-variants`: find vLLM's fastest variant for `bench engine`.

Variants are eager or compiled, with the model in the scheduler's process or its own. Each runs alone, bound
as in the comparison. The choice is kept per checkpoint, because finding it takes minutes.
"""

import json
import statistics
from argparse import ArgumentParser
from pathlib import Path

from bench.kit.context import Context
from bench.kit.cores import Cores, pin
from bench.kit.load import run_batch
from bench.kit.models import checkpoint, vocabulary
from bench.kit.outcome import Outcome
from bench.kit.peers import VLLM_VARIANTS, VllmVariant
from bench.kit.provenance import ROOT
from bench.kit.stats import geometric_mean
from bench.live.engine.duel import BatchCell, bodies, measure
from bench.live.engine.served import Setup, start_peer
from shared.errors import InternalError

CACHE = ROOT / ".cache" / "bench"
DEFAULT = VLLM_VARIANTS[0]
_CONTEXT, _OUTPUT_TOKENS, _REPEATS = 100, 32, 3
_LOAD_DEADLINE_S = 120.0


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--model", default="models/tiny_chat", help="as of `bench engine` [%(default)s]")
    parser.add_argument("--kv-gib", type=int, default=2, help="KV [%(default)s]")


def run(context: Context) -> Outcome:
    """Return figures `tok_s_VARIANT_bN`. `--quick` measures only the eager variants and keeps no choice."""
    flags = context.arguments
    model, cores = checkpoint(flags.model, CACHE), Cores.choose()
    cores.bind_client()
    workload = [
        BatchCell(_CONTEXT, batch, _OUTPUT_TOKENS) for batch in ((8,) if context.quick else (1, 8, 32))
    ]
    setup = Setup(model, flags.kv_gib, 64, cores.engine, context.run_dir.resolve())
    variants = [one for one in VLLM_VARIANTS if not (context.quick and one.compiled)]
    figures: dict[str, float] = {}
    overall: dict[str, float] = {}
    failures = 0
    with context.progress("variants", len(variants)) as progress:
        for variant in variants:
            rates, failed = _measure(context, setup, variant, cores, workload)
            figures |= {f"tok_s_{variant.name}_b{batch}": rate for batch, rate in rates.items()}
            overall[variant.name] = geometric_mean(rates.values())
            failures += failed
            progress.advance(now=variant.name)
    best = max(overall, key=lambda name: overall[name])
    if not context.quick:
        _choice_file(model).write_text(json.dumps({"variant": best, "figures": figures}, indent=2))
    return Outcome(
        figures, failures, notes=[f"fastest over these workloads: {best}"], extra={"fastest": best}
    )


def chosen(model: Path) -> tuple[VllmVariant, bool]:
    """Return the fastest variant for a checkpoint, and whether it was measured."""
    file = _choice_file(model)
    if not file.exists():
        return DEFAULT, False
    name = json.loads(file.read_text())["variant"]
    return next(variant for variant in VLLM_VARIANTS if variant.name == name), True


def _choice_file(model: Path) -> Path:
    CACHE.mkdir(parents=True, exist_ok=True)
    return CACHE / f"vllm-{model.name}.json"


def _measure(
    context: Context, setup: Setup, variant: VllmVariant, cores: Cores, workload: list[BatchCell]
) -> tuple[dict[int, float], int]:
    """Return median tokens per second by batch size, and the number of failed requests."""
    size = vocabulary(setup.model)
    with start_peer(setup, variant) as served:
        warm_up = bodies(workload[-1], size, context.random("warm-up"))[0]
        for _ in range(2):  # the first finds the thread; the second warms up as measured
            thread = pin(
                served.tree,
                cores,
                lambda: run_batch(served.target, warm_up, _LOAD_DEADLINE_S),
                served.engine,
            )
        rates: dict[int, float] = {}
        failures = 0
        for cell in workload:
            found = []
            for repeat in range(_REPEATS):
                rounds = bodies(cell, size, context.random(f"{cell.name}/{repeat}"))
                measured, _ = measure(served, thread, cell, rounds)
                context.record({"variant": variant.name, "cell": cell.name, **measured.row()}, "cells.jsonl")
                failures += measured.failures
                found.append(measured.tok_s)
            rates[cell.batch] = statistics.median(found)
        if min(rates.values()) <= 0:
            raise InternalError(f"vLLM {variant.name} answered nothing:\n{served.tree.tail()}")
        return rates, failures
