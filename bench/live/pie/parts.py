"""The live parts of `bench pie`: their sides, measurements and figures."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from bench.kit.context import Context
from bench.kit.cores import Cores
from bench.kit.load import LoadResult, full_answer, serve_all
from bench.kit.outcome import Outcome, Table
from bench.kit.stacks import PLAIN, start_stack
from bench.live.pie import cost
from bench.live.pie.arena import Arena
from bench.live.pie.loop import Request
from bench.live.pie.rounds import (
    SideResult,
    draw_reaction,
    measure,
    measure_work,
    react,
    reaction_figures,
    same_text_share,
    spread,
    waiting,
)
from bench.live.pie.sides import (
    AMPLE,
    AUTO,
    BLOCK_TOKENS,
    HOST_MB,
    MOST_SEQUENCES,
    RECOMPUTE,
    SWAP,
    Ground,
    fixed,
)
from services.worker.pie.core.sizes import LEAST_FIFO_LAYERS, expansion, most_fifo_layers


@dataclass(frozen=True)
class StackRun:
    """Result of one stack."""

    served: LoadResult
    details: Mapping[str, Any]
    """The worker's status at the end."""


def serve(
    context: Context, ground: Ground, requests: list[Request], settings: Mapping[str, object], name: str
) -> StackRun:
    """Start a stack, settle it with a quarter of the requests, and measure the rest."""
    cores = Cores.choose()
    folder = context.run_dir.resolve() / f"stack-{name}"
    whole = {
        **PLAIN,
        "worker.cores": [],
        "worker.engine_cores": [cores.engine],
        "worker.block_tokens": BLOCK_TOKENS,
        "worker.kv_blocks": ground.device_blocks,
        "worker.pie.enabled": False,
        "scheduler.max_batch_sequences": MOST_SEQUENCES,
        **settings,
    }
    bodies = [_body(each) for each in requests]
    with start_stack(folder, whole, model=ground.model) as stack:
        settle = len(bodies) // 4
        asyncio.run(serve_all(stack.target, bodies[:settle], ground.clients))
        served = asyncio.run(serve_all(stack.target, bodies[settle:], ground.clients))
        return StackRun(served, stack.details("engine_s"))


def with_pie(ground: Ground) -> dict[str, object]:
    """Return the settings of a stack that finds its expansion while it runs."""
    return {
        "worker.pie.enabled": True,
        "worker.pie.host_mb": HOST_MB,
        "worker.pie.bandwidth_limit": ground.bandwidth,
    }


def _body(request: Request) -> dict[str, Any]:
    body = full_answer(request.prompt, request.max_tokens)
    return body | {"ignore_eos": not request.end_token_ids}


def normalized_s(served: LoadResult) -> float:
    """Return the mean seconds per answer token; 0 if there are no answers."""
    answers = [each for each in served.answers if each.ok and each.completion_tokens]
    if not answers:
        return 0.0
    return sum((each.ended_s - each.sent_s) / each.completion_tokens for each in answers) / len(answers)


_NARROW_BYTES_S = 30e6
_SEARCH_FROM = 1.3
"""Least expansion in the search."""


def step(arena: Arena) -> Outcome:
    """Measure the cost of the longest queue per step."""
    slices = 2 if arena.context.quick else 24
    figures = cost.figures(*cost.compare(arena.ground, layers_of(arena), slices))
    note = "step: decode steps with the longest queue over equal ones without Pie on as many blocks"
    return Outcome(figures, 0, notes=[note], headline=list(figures))


def room(arena: Arena) -> Outcome:
    """Compare the sides on a link with spare bandwidth."""
    layers = layers_of(arena)
    flags = arena.context.arguments
    finalists = flags.lengths or _best_two(_search(arena, layers))
    kinds = [RECOMPUTE, SWAP, AMPLE, *(fixed(length) for length in finalists), AUTO]
    with arena.sides(kinds, arena.ground) as sides:
        served = arena.measure(
            "room", sides, flags.turns or arena.pace.rounds, partial(measure, duration_s=arena.pace.slice_s)
        )
        same = same_text_share(sides[-1], sides[0])
    recompute, swap, ample, auto = *served[:3], served[-1]
    best_fixed = max(served[3:-1], key=lambda each: each.tokens_per_s)
    better = max(recompute, swap, key=lambda each: each.tokens_per_s)
    figures = {
        **spread("throughput_vs_none", auto, better),
        "throughput_vs_recompute": auto.tokens_per_s / recompute.tokens_per_s,
        "throughput_vs_swap": auto.tokens_per_s / swap.tokens_per_s,
        **spread("vs_best_fixed", auto, best_fixed),
        "fixed_vs_none": best_fixed.tokens_per_s / better.tokens_per_s,
        "ample_vs_none": ample.tokens_per_s / better.tokens_per_s,
        **spread("of_ample", auto, ample),
        "stall_share": auto.mean(lambda each: each.stall_share),
        **waiting("latency_vs_none", lambda side: side.normalized_s, auto, better),
        **waiting("ttft_vs_none", lambda side: side.first_s, auto, better),
        "fifo_layers": auto.mean(lambda each: each.fifo_layers),
        "best_fixed_layers": float(best_fixed.name.split()[-1]),
        "same_text_share": same,
    }
    title = f"room: {arena.ground.bandwidth / 1e9:g} GB/s each way"
    note = (
        "throughput_vs_none: against the better of recompute and swap, all tokens over all turns' time, with "
        "the interval that holds it with 95 % (bootstrap of turns)"
    )
    return Outcome(
        figures, _failures(served), [_table(title, served, layers)], [note], headline=list(figures)
    )


def best(arena: Arena) -> Outcome:
    """Compare the expansion found with the best fixed one, with the same answers in each turn."""
    length, pace = (arena.context.arguments.lengths or [most_fifo_layers(layers_of(arena))])[0], arena.pace
    with arena.sides([fixed(length), AUTO], arena.ground, pace.best_settle_answers) as sides:
        one_slice = partial(measure_work, answers=pace.best_answers)
        served = arena.measure("best", sides, pace.best_rounds, one_slice)
    held, auto = served
    figures = {
        **spread("same_work_vs_fixed", auto, held),
        "same_work_fifo_layers": auto.mean(lambda each: each.fifo_layers),
        "same_work_stall_share": auto.mean(lambda each: each.stall_share),
    }
    table = _table(f"best: {length} layers, and found", served, layers_of(arena))
    note = f"best: each turn is the same {pace.best_answers} answers; the fixed queue has {length} layers"
    return Outcome(figures, _failures(served), [table], [note], headline=list(figures))


def _best_two(rates: dict[int, float]) -> list[int]:
    return sorted(rates, key=lambda length: -rates[length])[:2]


def _search(arena: Arena, layers: int) -> dict[int, float]:
    """Measure every useful queue length for a slice; return tokens per second by length."""
    lengths = [
        length
        for length in range(LEAST_FIFO_LAYERS, most_fifo_layers(layers) + 1)
        if expansion(layers, length) >= _SEARCH_FROM
    ]
    lengths = lengths[-3:-2] if arena.context.quick else sorted({*lengths[::2], *lengths[-3:]})
    found: dict[int, float] = {}
    with arena.context.progress("search", len(lengths)) as bar:
        for length in lengths:
            bar.advance(0, now=f"fixed {length}")
            with arena.sides([fixed(length)], arena.ground) as (side,):
                found[length] = measure(side, 0.5 * arena.pace.slice_s).tokens_per_s
            arena.context.record({"fifo_layers": length, "tokens_per_s": found[length]}, "search.jsonl")
            bar.advance()
    return found


def narrow(arena: Arena) -> Outcome:
    """Compare the sides on a link without spare bandwidth, where swapping nothing is best."""
    ground = replace(arena.ground, bandwidth=_NARROW_BYTES_S)
    pace = arena.pace
    with arena.sides([RECOMPUTE, SWAP, AUTO], ground, pace.narrow_settle_answers) as sides:
        one_slice = partial(measure_work, answers=pace.narrow_answers)
        served = arena.measure("narrow", sides, pace.narrow_rounds, one_slice)
    recompute, swap, auto = served
    better = max(recompute, swap, key=lambda each: each.tokens_per_s)
    figures = {
        **spread("narrow_vs_none", auto, better),
        "narrow_vs_recompute": auto.tokens_per_s / recompute.tokens_per_s,
        "narrow_vs_swap": auto.tokens_per_s / swap.tokens_per_s,
        "narrow_stall_share": auto.mean(lambda each: each.stall_share),
        **waiting("narrow_latency_vs_none", lambda side: side.normalized_s, auto, better),
        "narrow_fifo_layers": auto.mean(lambda each: each.fifo_layers),
    }
    table = _table(f"narrow: {_NARROW_BYTES_S / 1e6:g} MB/s each way", served, layers_of(arena))
    note = f"narrow: each turn is the same {pace.narrow_answers} answers for every side"
    return Outcome(figures, _failures(served), [table], [note], headline=list(figures))


def reaction(arena: Arena) -> Outcome:
    """Measure the reaction when other traffic takes nine tenths of the link, and ends."""
    away_s = arena.pace.away_s
    background = 0.9 * arena.ground.bandwidth
    with arena.sides([AUTO], arena.ground) as (side,):
        found = react(
            side,
            [(away_s / 2, 0.0), (away_s, background), (1.5 * away_s, 0.0)],
            lambda moment: arena.context.record(
                {"at_s": moment.at_s, "tokens_per_s": moment.tokens_per_s, "fifo_layers": moment.fifo_layers}
                | {"stall_share": moment.stall_share},
                "reaction.jsonl",
            ),
        )
    draw_reaction(arena.context.picture("reaction"), found)
    figures = reaction_figures(found)
    return Outcome(
        figures, 0, notes=["reaction: others take 0.9 of the link, then none"], headline=list(figures)
    )


def stack(arena: Arena) -> Outcome:
    """Measure whole stacks one after the other: without, with, without Pie."""
    requests = list(islice(arena.workload.requests(), 40 if arena.context.quick else 96))
    sides = [("none-1", {}), ("pie", with_pie(arena.ground)), ("none-2", {})]
    runs = {}
    with arena.context.progress("stacks", len(sides)) as bar:
        for name, settings in sides:
            bar.advance(0, now=name)
            runs[name] = serve(arena.context, arena.ground, requests, settings, name)
            bar.advance()
    none = [runs["none-1"].served, runs["none-2"].served]
    pie = runs["pie"]
    rate = sum(each.requests_per_s for each in none) / 2
    latency_s = sum(normalized_s(each) for each in none) / 2
    figures = {
        "stack_vs_none": pie.served.requests_per_s / rate,
        "stack_latency_vs_none": normalized_s(pie.served) / latency_s,
        "stack_stall_share": float(pie.details["pie_stall_share"]),
        "stack_fifo_layers": float(pie.details["pie_fifo_layers"]),
    }
    rows = [
        (name, run.served.requests_per_s, run.served.tokens_per_s, normalized_s(run.served) * 1e3)
        for name, run in runs.items()
    ]
    failures = sum(run.served.failures for run in runs.values())
    table = Table("stacks over HTTP", ("side", "requests/s", "tokens/s", "ms per token"), rows)
    return Outcome(figures, failures, [table], headline=list(figures))


def layers_of(arena: Arena) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(arena.ground.model).num_hidden_layers)


def _failures(served: Sequence[SideResult]) -> int:
    return sum(each.failures for each in served)


def _table(title: str, served: Sequence[SideResult], layers: int) -> Table:
    columns = (
        "side",
        "tok/s",
        "step ms",
        "batch",
        "stall",
        "layers",
        "expansion",
        "ms/token",
        "ttft s",
        "answers",
    )
    rows = [
        (
            each.name,
            f"{each.tokens_per_s:.0f}",
            f"{each.mean(lambda one: one.step_s) * 1e3:.1f}",
            f"{each.mean(lambda one: one.batch):.1f}",
            f"{each.mean(lambda one: one.stall_share):.4f}",
            f"{each.mean(lambda one: one.fifo_layers):.1f}",
            f"{each.mean(lambda one: expansion(layers, one.fifo_layers)):.2f}",
            f"{each.normalized_s * 1e3:.0f}",
            f"{each.first_s:.2f}",
            each.ended,
        )
        for each in served
    ]
    return Table(title, columns, rows)
