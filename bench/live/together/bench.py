"""`python -m bench together`: the mechanisms for short memory combined, against each alone and none.

Every measurement has a new stack, warmed up with a few requests of the same kind. So no side inherits caches,
debts or queues. Of two equal stacks that run side by side, the one started first is slower.
"""

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence

import uvloop

from bench.kit.context import Context
from bench.kit.load import Answer, LoadResult, Target, first_error, full_answer, serve_all
from bench.kit.models import TINY_CHAT, checkpoint, vocabulary
from bench.kit.outcome import Outcome
from bench.kit.stacks import CACHE, LENDING, OFF, PIE, PLAIN, RELIEF, Settings, start_stack
from bench.live.together import rungs
from bench.live.together.figures import AMPLE, EVERYTHING, NONE, Turn, figures_of, rung_figures, table_of
from bench.live.together.workloads import BLOCK_TOKENS, KV_BLOCKS, WORKERS, WORKLOADS, Request, Workload
from shared.errors import InternalError

_BORROWED_FREELY: Settings = {**LENDING, "worker.lending.max_lent_fraction": 1}
SINGLES: Mapping[str, Settings] = {"cache": CACHE, "lending": _BORROWED_FREELY, "relief": RELIEF, "pie": PIE}
SIDES: Mapping[str, Settings] = {
    NONE: OFF,
    **{name: {**OFF, **own} for name, own in SINGLES.items()},
    EVERYTHING: CACHE,
    AMPLE: {**OFF, **CACHE, "worker.kv_blocks": 5 * KV_BLOCKS},
}
"""`everything` is the default configuration: only `PLAIN` disables the cache. `ample` has the same workers
with enough memory, the upper bound of every mechanism."""
_COMMON: Settings = {**PLAIN, "scheduler.policy": "kvasir", "worker.block_tokens": BLOCK_TOKENS}
TURNS = 7
_QUICK = ("mixed", "harmless")
_WARM_REQUESTS = 8
_UNTIL_S = 120.0
"""Requests not finished this long after the start count as unserved; a load takes about ten seconds."""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    names = sorted({workload.name for workload in (*WORKLOADS, *rungs.WORKLOADS)})
    add("--rungs", action="store_true", help="each rung of the relief ladder off, in turn")
    add("--workloads", nargs="+", choices=names, help=f"only these [all; --quick {' '.join(_QUICK)}]")
    add("--turns", type=int, help=f"of all sides [{TURNS}; --quick 1]")
    add("--requests", type=int, help="at most so many of each workload [all that it has]")
    add("--model", default=str(TINY_CHAT), help="a folder, or random-50m, random-100m, random-1b [Tiny Chat]")
    add("--device", default="cpu", help="of the workers; all share one GPU, in bfloat16")
    singles = list(SINGLES)
    add(
        "--singles",
        nargs="+",
        choices=singles,
        default=singles,
        help="only these beside none, everything and ample",
    )


def run(context: Context) -> Outcome:
    """Run the bench. Raises InternalError if a stack does not start, or serves nothing of a load."""
    flags = context.arguments
    known, settings = (rungs.WORKLOADS, rungs.VARIANTS) if flags.rungs else (WORKLOADS, SIDES)
    quick = ("repeats",) if flags.rungs else _QUICK
    names = flags.workloads or (quick if context.quick else [workload.name for workload in known])
    workloads = [workload for workload in known if workload.name in names]
    wanted = rungs.VARIANTS if flags.rungs else (NONE, EVERYTHING, AMPLE, *flags.singles)
    count = flags.turns or (1 if context.quick else TURNS)
    turns: dict[str, dict[str, list[Turn]]] = {
        workload.name: {side: [] for side in workload.sides or settings if side in wanted}
        for workload in workloads
    }
    with context.progress("stacks", count * sum(map(len, turns.values()))) as progress:
        for turn in range(count):
            for workload in workloads:
                sides = list(turns[workload.name])
                for side in context.random(f"order/{workload.name}/{turn}").sample(sides, len(sides)):
                    progress.advance(0, now=f"{workload.name}, {side}")
                    measured = _measure(context, workload, side, settings[side], turn)
                    turns[workload.name][side].append(measured)
                    progress.advance()
    tables = [table_of(workload.name, workload.about, turns[workload.name]) for workload in workloads]
    if flags.rungs:
        figures = {k: v for name, by_side in turns.items() for k, v in rung_figures(name, by_side).items()}
        notes = ["speed_of: tokens/s over `all` in the same turn, median; expand_only: over recompute_only"]
        headline = [name for name in figures if not name.startswith("tok_s_")]
        return Outcome(figures, 0, tables, notes, headline=headline)
    short = [workload.name for workload in workloads if workload.is_short]
    harmless = [workload.name for workload in workloads if not workload.is_short]
    figures = figures_of(turns, short, harmless)
    return Outcome(
        figures,
        failures=int(figures["unserved"]),
        tables=tables,
        notes=_notes(context),
        headline=[name for name in figures if not name.startswith(("p99_ttft_s_", "unserved_"))],
    )


def _measure(context: Context, workload: Workload, side: str, settings: Settings, turn: int) -> Turn:
    """Measure a side on a new stack, with the same requests as all sides in this turn."""
    flags = context.arguments
    model = checkpoint(workload.model or flags.model)
    tokens = vocabulary(model)
    warm, asked = (
        workload.draw(context.random(f"{workload.name}/{purpose}"), tokens, quick=context.quick)
        for purpose in ("warm", turn)
    )
    asked = asked[: flags.requests]
    folder = context.run_dir.resolve() / f"{workload.name}-{side}-{turn}"
    device = {} if flags.device == "cpu" else {"worker.device": flags.device, "worker.dtype": "bfloat16"}
    whole = {**_COMMON, "worker.kv_blocks": workload.kv_blocks, **settings, **workload.settings, **device}
    with start_stack(folder, whole, model=model, workers=WORKERS) as stack:
        _serve(stack.target, warm[:_WARM_REQUESTS], workload.at_once)
        load = _serve(stack.target, asked, workload.at_once)
    named = {"workload": workload.name, "side": side, "turn": turn}
    for request, answer in zip(asked, load.answers, strict=True):
        context.record({**named, **_row(request, answer)})
    found = turn_of(asked, load)
    told = {"tok_s": found.tok_s, "unserved": found.unserved, "took_s": load.elapsed_s}
    context.record({**named, **told}, file="turns.jsonl")
    if not found.tok_s:
        raise InternalError(f"{side} serves nothing of {workload.name}: {first_error(load.answers)}")
    return found


def _serve(target: Target, requests: Sequence[Request], at_once: int) -> LoadResult:
    bodies = [full_answer(request.prompt, request.answer_tokens) for request in requests]
    due_s = [request.at_s for request in requests]
    return uvloop.run(serve_all(target, bodies, at_once, due_s=due_s, until_s=_UNTIL_S))


def turn_of(asked: Sequence[Request], load: LoadResult) -> Turn:
    """Return the result of a turn; answers that failed or have the wrong length do not count."""
    pairs = zip(asked, load.answers, strict=True)
    served = [pair for pair in pairs if pair[1].ok and pair[1].completion_tokens == pair[0].answer_tokens]
    answered = sum(answer.completion_tokens for _, answer in served)
    prompted = sum(len(request.prompt) for request, _ in served)
    return Turn(
        tok_s=answered / load.elapsed_s,
        work_tok_s=(prompted + answered) / load.elapsed_s,
        ttft_s=[answer.first_s for _, answer in served if answer.event_s],
        unserved=len(asked) - len(served),
    )


def _row(request: Request, answer: Answer) -> dict[str, object]:
    return {
        "at_s": request.at_s,
        "prompt_tokens": len(request.prompt),
        "cached_tokens": answer.cached_tokens,
        "answer_tokens": request.answer_tokens,
        "ttft_s": answer.first_s if answer.event_s else None,
        "end_s": answer.ended_s - answer.sent_s,
        "error": answer.error,
    }


def _notes(context: Context) -> list[str]:
    flags = context.arguments
    return [
        f"{WORKERS} workers of {KV_BLOCKS} blocks, a new stack for each side, workload and turn",
        f"everything: default settings; singles: {', '.join(flags.singles)}; device: {flags.device}",
        "tok_s: output tokens of answers that are whole, median over turns; unserved: of `everything`, "
        f"refused, failed or not over after {_UNTIL_S:.0f} s",
        "work_tok_s, work_vs_...: the same with the prompts of these answers: who refuses a long prompt has "
        "not done its work",
        "vs_best_single, vs_none: median ratio within one turn, geometric mean over the workloads where "
        "memory is short; _low and _high: 95 % interval over turns",
    ]
