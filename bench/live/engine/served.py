"""The two servers of a comparison: equal KV bytes, float32, one compute thread, chunked prefill.

They start together, take turns, and always end.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.kit.context import Context
from bench.kit.cores import Cores
from bench.kit.models import vocabulary
from bench.kit.peers import VllmVariant, start_vllm, vllm_binary
from bench.kit.stacks import PLAIN, Server, start_all, start_stack
from bench.live.engine.duel import BatchCell, Duel, run_turns

MAX_CONTEXT_TOKENS = 2048
GIB = 1 << 30


@dataclass(frozen=True)
class Setup:
    """Settings shared by the sides."""

    model: Path
    kv_gib: int
    max_sequences: int
    engine_core: int
    run_dir: Path
    gguf: Path | None = None
    """Weights for llama.cpp; None for the model's, in F32."""


def start_kvasir(setup: Setup) -> Server:
    """Start a stack with one worker and default settings except KV size and batch limit."""
    settings = {
        **PLAIN,
        "worker.kv_bytes": setup.kv_gib * GIB,
        "scheduler.max_batch_sequences": setup.max_sequences,
    }
    return start_stack(setup.run_dir / "kvasir", settings, model=setup.model)


def start_peer(setup: Setup, variant: VllmVariant) -> Server:
    """Start vLLM with the same KV bytes. Raises ConfigError if it is not set up."""
    return start_vllm(
        setup.run_dir,
        setup.model,
        variant,
        engine_core=setup.engine_core,
        context_tokens=MAX_CONTEXT_TOKENS,
        max_sequences=setup.max_sequences,
        kv_gib=setup.kv_gib,
    )


def run_served(
    context: Context,
    model: Path,
    peer: str,
    variant: VllmVariant,
    workload: Sequence[BatchCell],
    todo: Sequence[tuple[int, BatchCell]],
    cores: Cores,
) -> int:
    """Run the turns; return how many exceeded the budget. Raises ConfigError if the peer is not installed."""
    setup = Setup(
        model=model,
        kv_gib=context.arguments.kv_gib,
        max_sequences=max(cell.batch for cell in workload),
        engine_core=cores.engine,
        run_dir=context.run_dir.resolve(),
        gguf=context.arguments.gguf,
    )
    with ExitStack() as running:
        starts = _starts(peer, variant, setup)
        context.say("starting both servers")
        duel = Duel(context, start_all(starts, running), cores, vocabulary(model))
        duel.prepare(max(workload, key=lambda cell: cell.batch * cell.context))
        return run_turns(duel, todo, budget_s=context.arguments.budget_s)


def _starts(peer: str, variant: VllmVariant, setup: Setup) -> list[Callable[[], Server]]:
    """Return the sides' start functions, ours first. Raises ConfigError if the peer is not installed."""
    if peer == "vllm":
        vllm_binary()
        return [partial(start_kvasir, setup), partial(start_peer, setup, variant)]
    from bench.live.engine.llamacpp import start_llamacpp

    return [partial(start_kvasir, setup), partial(start_llamacpp, setup)]
