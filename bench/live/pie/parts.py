"""The live parts of `bench pie`: their sides, measurements and figures."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial

from bench.kit.outcome import Outcome, Table
from bench.live.pie.arena import Arena
from bench.live.pie.rounds import (
    SideResult,
    Slice,
    draw_reaction,
    measure,
    measure_work,
    react,
    reaction_figures,
    same_text_share,
    spread,
    waiting,
)
from bench.live.pie.sides import AMPLE, AUTO, RECOMPUTE, SWAP, fixed
from services.worker.pie.core.sizes import LEAST_FIFO_LAYERS, expansion, most_fifo_layers

_NARROW_BYTES_S = 30e6
_SEARCH_FROM = 1.3
"""Least expansion in the search."""


def room(arena: Arena) -> Outcome:
    """Compare the sides on a link with spare bandwidth."""
    layers = layers_of(arena)
    flags = arena.context.arguments
    rates = {} if flags.lengths else _search(arena, layers)
    finalists = flags.lengths or sorted(rates, key=lambda length: -rates[length])[:2]
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
        figures,
        sum(each.failures for each in served),
        [_table(title, served, layers)],
        [note],
        headline=list(figures),
    )


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
    return Outcome(figures, sum(each.failures for each in served), [table], [note], headline=list(figures))


def reaction(arena: Arena) -> Outcome:
    """Measure the reaction when other traffic takes nine tenths of the link, and ends."""
    away_s = arena.pace.away_s
    background = 0.9 * arena.ground.bandwidth
    with arena.sides([AUTO], arena.ground) as (side,):
        found = react(
            side,
            [(away_s / 2, 0.0), (away_s, background), (1.5 * away_s, 0.0)],
            lambda moment: arena.context.record(asdict(moment), "reaction.jsonl"),
        )
    draw_reaction(arena.context.picture("reaction"), found)
    figures = reaction_figures(found)
    return Outcome(
        figures, 0, notes=["reaction: others take 0.9 of the link, then none"], headline=list(figures)
    )


def layers_of(arena: Arena) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(arena.ground.model).num_hidden_layers)


def _table(title: str, served: Sequence[SideResult], layers: int) -> Table:
    columns = "side,tok/s,step ms,batch,stall,layers,expansion,ms/token,ttft s,answers".split(",")
    means: tuple[Callable[[Slice], float], ...] = (
        lambda one: one.step_s * 1e3,
        lambda one: one.batch,
        lambda one: one.stall_share,
        lambda one: one.fifo_layers,
        lambda one: expansion(layers, one.fifo_layers),
    )
    rows = [
        (one.name, one.tokens_per_s, *map(one.mean, means), one.normalized_s * 1e3, one.first_s, one.ended)
        for one in served
    ]
    return Table(title, columns, rows)
