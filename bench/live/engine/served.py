"""Starts both servers of a comparison, lets them take turns, ends them whatever happens."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from bench.kit.context import Context
from bench.kit.cores import Cores
from bench.kit.models import vocabulary
from bench.kit.peers import Server, Setup, StartSide, VllmVariant, start_kvasir, start_vllm, vllm_binary
from bench.live.engine.duel import Duel, run_turns
from bench.live.engine.workload import BatchCell


def run_served(
    context: Context,
    model: Path,
    peer: str,
    variant: VllmVariant,
    workload: Sequence[BatchCell],
    todo: Sequence[tuple[int, BatchCell]],
    cores: Cores,
) -> int:
    """How many turns did not fit into the budget. Raises ConfigError when the peer is not installed."""
    setup = Setup(
        model=model,
        kv_gib=context.arguments.kv_gib,
        max_sequences=max(cell.batch for cell in workload),
        engine_core=cores.engine,
        run_dir=context.run_dir.resolve(),
    )
    with ExitStack() as running:
        sides = _start_all(context, running, _starts(peer, variant), setup)
        duel = Duel(context, sides, cores, vocabulary(model))
        duel.prepare(max(workload, key=lambda cell: cell.batch * cell.context))
        return run_turns(duel, todo, budget_s=context.arguments.budget_s)


def _starts(peer: str, variant: VllmVariant) -> list[StartSide]:
    """Ours first. Raises ConfigError when the peer is not installed."""
    if peer == "vllm":
        vllm_binary()
        return [start_kvasir, partial(start_vllm, variant=variant)]
    from bench.live.engine.llamacpp import start_llamacpp

    return [start_kvasir, start_llamacpp]


def _start_all(
    context: Context, running: ExitStack, starts: Sequence[StartSide], setup: Setup
) -> list[Server]:
    """Side by side: each takes long. Whatever did start is ended when another did not."""
    context.say("starting both servers")
    sides: list[Server] = []
    with ThreadPoolExecutor(len(starts)) as pool:
        waiting = [pool.submit(start, setup) for start in starts]
        failed: list[Exception] = []
        for future in waiting:
            try:
                served = future.result()
            except Exception as error:
                failed.append(error)
                continue
            running.callback(served.side.end)
            sides.append(served)
    if failed:
        raise failed[0]
    return sides
