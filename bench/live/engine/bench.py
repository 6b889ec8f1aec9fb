"""`python -m bench engine --peer vllm`: tokens per second over HTTP, a core each, with alternating sides."""

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.kit.cells import check_resumable, read_cells
from bench.kit.context import Context
from bench.kit.cores import Cores
from bench.kit.models import RANDOM_SHAPES, checkpoint, vocabulary
from bench.kit.outcome import Outcome
from bench.kit.peers import VLLM_VARIANTS, VllmVariant
from bench.live.engine import figures
from bench.live.engine.duel import BatchCell, cells, missing
from bench.live.engine.figures import draw
from bench.live.engine.served import run_served
from bench.live.engine.variants import CACHE, chosen
from shared.errors import ConfigError

_ALTERNATIONS, _QUICK_ALTERNATIONS = 5, 2
_VARIANTS = {variant.name: variant for variant in VLLM_VARIANTS}


@dataclass(frozen=True)
class Plan:
    """Settings of a comparison."""

    peer: str
    model: Path
    variant: VllmVariant
    workload: tuple[BatchCell, ...]
    turns: tuple[tuple[int, BatchCell], ...]
    gguf: Path | None = None


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--peer", choices=("vllm", "transformers", "llamacpp"), default="vllm")
    parser.add_argument(
        "--gguf",
        type=_gguf_file,
        metavar="FILE",
        help="the same model for --peer llamacpp, its weights of any type [made of --model, F32]",
    )
    parser.add_argument(
        "--model",
        default="models/tiny_chat",
        help=f"folder, or {', '.join(RANDOM_SHAPES)}: random weights, made on first use [%(default)s]",
    )
    parser.add_argument("--batches", type=_numbers, help="concurrent requests [1,8,32,64]")
    parser.add_argument("--contexts", type=_numbers, help="prompt tokens [100,500; a random model: 100]")
    parser.add_argument("--output-tokens", type=int, help="of every answer [64; a random model: 32]")
    parser.add_argument("--alternations", type=int, help="[5]")
    parser.add_argument("--kv-gib", type=int, default=2, help="KV of each side [%(default)s]")
    parser.add_argument(
        "--vllm",
        choices=["auto", *sorted(_VARIANTS)],
        default="auto",
        help="how vLLM runs; auto: the fastest by `bench vllm-variants`",
    )
    parser.add_argument(
        "--budget-s", type=float, default=450.0, help="start nothing that would end later [%(default)g]"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")


def run(context: Context) -> Outcome:
    """Run the bench. Raises ConfigError if the peer is not installed or a run cannot be resumed."""
    model = checkpoint(context.arguments.model, CACHE)
    variant, note = _vllm_variant(context.arguments.vllm, model)
    plan = _plan(context, model, variant)
    check_resumable(context, _identity(context, plan))
    todo = missing(plan.turns, read_cells(context.run_dir))
    left_out = _measure(context, plan, todo) if todo else 0
    rows = read_cells(context.run_dir)
    made = figures.figures(rows, plan.workload, plan.peer)
    if made:
        draw(context.picture("ratios"), made, plan.workload, plan.peer)
    notes = [
        "tok/s: output tokens / time from the first request to the last answer, prefill included",
        "a batch size's ratio is the geometric mean over its contexts, then the median over alternations",
        *([note] if plan.peer == "vllm" else []),
        *(["engines called directly, no server on either side"] if plan.peer == "transformers" else []),
        *([f"{left_out} turns did not fit into --budget-s: --resume --out DIR goes on"] if left_out else []),
    ]
    return Outcome(
        figures=made,
        failures=figures.failures(rows),
        tables=[figures.table(rows, plan.workload, plan.peer)],
        notes=notes,
        headline=figures.headline(made),
        extra={"incomplete": left_out, "peer": _peer_record(plan)},
    )


def _plan(context: Context, model: Path, variant: VllmVariant) -> Plan:
    """Return the plan; --quick has two alternations of two small batches."""
    flags, quick = context.arguments, context.quick
    random = flags.model in RANDOM_SHAPES
    workload = cells(
        flags.contexts or ([100] if quick or random else [100, 500]),
        flags.batches or ([1, 8] if quick else [1, 8, 32, 64]),
        flags.output_tokens or (32 if quick or random else 64),
    )
    alternations = flags.alternations or (_QUICK_ALTERNATIONS if quick else _ALTERNATIONS)
    turns = tuple((turn, cell) for turn in range(alternations) for cell in workload)
    if flags.gguf and flags.peer != "llamacpp":
        raise ConfigError("--gguf has the weights of --peer llamacpp", param="gguf")
    return Plan(flags.peer, model, variant, tuple(workload), turns, flags.gguf)


def _measure(context: Context, plan: Plan, todo: list[tuple[int, BatchCell]]) -> int:
    """Measure the turns; return how many were left out."""
    cores = Cores.choose()
    if plan.peer == "transformers":
        from bench.live.engine.direct import run_direct

        return run_direct(context, plan.model, todo, cores, vocabulary(plan.model))
    return run_served(context, plan.model, plan.peer, plan.variant, plan.workload, todo, cores)


def _vllm_variant(name: str, model: Path) -> tuple[VllmVariant, str]:
    """Return the variant of vLLM, and a sentence on its choice."""
    if name != "auto":
        return _VARIANTS[name], f"vLLM runs {name}, as asked for"
    variant, measured = chosen(model)
    why = "the fastest by" if measured else "not compared with other ways; that does"
    return variant, f"vLLM runs {variant.name}, {why} `bench vllm-variants`"


def _peer_record(plan: Plan) -> Mapping[str, Any]:
    variant = {"variant": plan.variant.name} if plan.peer == "vllm" else {}
    return {"name": plan.peer, **variant, **({"weights": plan.gguf.name} if plan.gguf else {})}


def _identity(context: Context, plan: Plan) -> dict[str, Any]:
    return {
        "model": plan.model.name,
        "peer": dict(_peer_record(plan)),
        "kv_gib": context.arguments.kv_gib,
        "seed": context.seed,
        "cells": [[cell.name, cell.output_tokens] for cell in plan.workload],
    }


def _gguf_file(text: str) -> Path:
    file = Path(text)
    with suppress(OSError), file.open("rb") as opened:
        if opened.read(4) == b"GGUF":
            return file.resolve()
    raise ArgumentTypeError(f"{text} is no GGUF file")


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError as error:
        raise ArgumentTypeError("numbers separated by commas, as in 1,8,32") from error
    if min(numbers) < 1:
        raise ArgumentTypeError("numbers from 1")
    return numbers
