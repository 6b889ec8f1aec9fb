"""The live part of `python -m bench pie`: real engines on little KV, by turns, under one scheduler core each.

Parts: `room`, the link leaves room; `narrow`, it does not; `reaction`, others use it for a while; `stack`,
whole stacks over HTTP. All sides have the same device bytes: the layers' slots, buffers included.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch

from bench.context import Context
from bench.engine.checkpoint import TINY_CHAT, checkpoint
from bench.outcome import Outcome, Table
from bench.pie import pictures, reaction, stack
from bench.pie.figure4 import figure4
from bench.pie.rounds import Served, Slice, compared, measure, same_text_share, take_turns
from bench.pie.sides import AUTO, BLOCK_TOKENS, RECOMPUTE, SWAP, Ground, Kind, Side, fixed, synchronous
from bench.pie.workload import Workload
from bench.prefix.parts import joined
from bench.provenance import ROOT
from services.worker.pie.sizes import LEAST_FIFO_LAYERS, expansion, most_fifo_layers

PARTS = ("room", "narrow", "reaction", "stack")
_CLIENTS = 48
_ROOM_BYTES_S, _NARROW_BYTES_S = 3e9, 30e6
_SEARCH_FROM = 1.3
"""Expansions below are not worth a place in the search."""
_SWITCH_INTERVAL_S = 0.0002
"""As a worker has it."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a slice, before the first one, the same for `auto`, and under traffic."""

    rounds: int
    slice_s: float
    warm_s: float
    settle_s: float
    away_s: float


FULL = Pace(3, 5.0, 4.0, 20.0, 20.0)
QUICK = Pace(1, 1.5, 1.0, 4.0, 2.0)


def add_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("of the live part")
    group.add_argument("--part", nargs="+", choices=PARTS, help="[all; quick: without stack]")
    group.add_argument("--model", help="folder of a Llama, or a random one [random-50m; quick: tiny_chat]")
    group.add_argument(
        "--fits", type=int, default=8, metavar="N", help="KV for so many mean requests [%(default)s]"
    )
    group.add_argument(
        "--bandwidth",
        type=float,
        default=_ROOM_BYTES_S,
        metavar="B",
        help="of the link, bytes/s [%(default)g]",
    )
    group.add_argument("--trace", type=Path, help="JSONL rows with `prompt` and `response`")


def run(context: Context) -> Outcome:
    """Raises ConfigError for a model or a trace that cannot be read."""
    torch.set_num_threads(1)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    flags = context.arguments
    parts = flags.part or (PARTS[:3] if context.quick else PARTS)
    arena = Arena(context)
    takes: dict[str, Callable[[], Outcome]] = {
        "room": lambda: _room(arena),
        "narrow": lambda: _narrow(arena),
        "reaction": lambda: _reaction(arena),
        "stack": lambda: _stack(arena),
    }
    first = Outcome(figure4(), 0, notes=arena.notes(), headline=["fig4_expansion", "fig4_stalls"])
    return joined([first, *(takes[part]() for part in PARTS if part in parts)])


class Arena:
    """What all parts share: the model, the workload, how long everything takes."""

    def __init__(self, context: Context) -> None:
        flags = context.arguments
        self.context = context
        name = flags.model or (str(TINY_CHAT) if context.quick else "random-50m")
        model = checkpoint(name, ROOT / "runs" / "bench" / "checkpoints")
        self.workload = Workload(name, context.seed, flags.trace)
        self.mean_tokens = self.workload.mean_tokens()
        blocks = int(flags.fits * self.mean_tokens // BLOCK_TOKENS)
        self.ground = Ground(model, blocks, flags.bandwidth, _CLIENTS)
        self.pace = QUICK if context.quick else FULL

    @contextmanager
    def sides(
        self, kinds: Sequence[Kind], ground: Ground, warm_s: float | None = None
    ) -> Iterator[list[Side]]:
        """Warm: each has served for a while, `warm_s` if given."""
        sides: list[Side] = []
        try:
            for kind in kinds:
                sides.append(Side(kind, ground, self.workload.requests(ground.clients)))
                usual_s = self.pace.settle_s if kind == AUTO else self.pace.warm_s
                sides[-1].loop.run(usual_s if warm_s is None else warm_s)
            yield sides
        finally:
            for side in sides:
                side.close()

    def measure(self, part: str, sides: Sequence[Side]) -> list[Served]:
        def on_slice(side: Side, one: Slice) -> None:
            row = {
                "part": part,
                "side": side.kind.name,
                "tokens_per_s": one.tokens_per_s,
                "step_s": one.step_s,
            }
            row |= {"batch": one.batch, "stall_share": one.stall_share, "fifo_layers": one.fifo_layers}
            self.context.record(row, "slices.jsonl")
            bar.advance(now=f"{part}, {side.kind.name}")

        with self.context.progress("slices", self.pace.rounds * len(sides)) as bar:
            return take_turns(sides, self.pace.rounds, self.pace.slice_s, on_slice)

    def notes(self) -> list[str]:
        ground, fits = self.ground, self.context.arguments.fits
        return [
            f"{ground.device_blocks} blocks of {BLOCK_TOKENS} tokens on every side ({fits} mean requests of "
            f"{self.mean_tokens:.0f} tokens), {ground.clients} clients, policy vllm",
            "swap: the prefix cache's host tier over the same link; synchronous: Pie's store without overlap",
        ]


def _room(arena: Arena) -> Outcome:
    """The link leaves room."""
    layers = _layers(arena)
    rates = _search(arena, layers)
    best = max(rates, key=lambda length: rates[length])
    finalists = sorted({*sorted(rates, key=lambda length: -rates[length])[:2], best})
    kinds = [RECOMPUTE, SWAP, synchronous(best), *(fixed(length) for length in finalists), AUTO]
    with arena.sides(kinds, arena.ground) as sides:
        served = arena.measure("room", sides)
        same = same_text_share(sides[-1], sides[0])
    recompute, swap, auto = served[0], served[1], served[-1]
    best_fixed = max(served[3:-1], key=lambda each: each.tokens_per_s)
    better = max(recompute, swap, key=lambda each: each.tokens_per_s)
    versus, against = compared(auto, better), compared(auto, best_fixed)
    figures = {
        "throughput_vs_none": versus.median,
        "throughput_vs_none_worst": versus.worst,
        "throughput_vs_recompute": compared(auto, recompute).median,
        "throughput_vs_swap": compared(auto, swap).median,
        "throughput_vs_synchronous": compared(auto, served[2]).median,
        "vs_best_fixed": against.median,
        "vs_best_fixed_worst": against.worst,
        "stall_share": auto.mean(lambda each: each.stall_share),
        "latency_vs_none": auto.normalized_s / better.normalized_s,
        "ttft_vs_none": auto.first_s / better.first_s,
        "fifo_layers": auto.mean(lambda each: each.fifo_layers),
        "best_fixed_layers": float(best_fixed.name.split()[-1]),
        "same_text_share": same,
    }
    title = f"room: {arena.ground.bandwidth / 1e9:g} GB/s each way"
    note = "throughput_vs_none: against the better of recompute and swap, medians over turns"
    return Outcome(
        figures, _failures(served), [_table(title, served, layers)], [note], headline=list(figures)
    )


def _search(arena: Arena, layers: int) -> dict[int, float]:
    """Every length that is worth it, for a slice: queue length → tokens per second."""
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


def _narrow(arena: Arena) -> Outcome:
    """The link does not: at best nothing is swapped."""
    ground = replace(arena.ground, bandwidth=_NARROW_BYTES_S)
    with arena.sides([RECOMPUTE, SWAP, AUTO], ground, arena.pace.settle_s) as sides:
        served = arena.measure("narrow", sides)
    recompute, swap, auto = served
    better = max(recompute, swap, key=lambda each: each.tokens_per_s)
    versus = compared(auto, better)
    figures = {
        "narrow_vs_none": versus.median,
        "narrow_vs_none_worst": versus.worst,
        "narrow_stall_share": auto.mean(lambda each: each.stall_share),
        "narrow_latency_vs_none": auto.normalized_s / better.normalized_s,
    }
    table = _table(f"narrow: {_NARROW_BYTES_S / 1e6:g} MB/s each way", served, _layers(arena))
    return Outcome(figures, _failures(served), [table], headline=list(figures))


def _reaction(arena: Arena) -> Outcome:
    """Nine tenths of the link are taken, and given back."""
    away_s = arena.pace.away_s
    background = 0.9 * arena.ground.bandwidth
    with arena.sides([AUTO], arena.ground) as (side,):
        found = reaction.react(
            side,
            [(away_s / 2, 0.0), (away_s, background), (1.5 * away_s, 0.0)],
            lambda moment: arena.context.record(
                {"at_s": moment.at_s, "tokens_per_s": moment.tokens_per_s, "fifo_layers": moment.fifo_layers}
                | {"stall_share": moment.stall_share},
                "reaction.jsonl",
            ),
        )
    pictures.draw_reaction(arena.context.picture("reaction"), found.moments, found.traffic)
    figures = reaction.figures(found)
    return Outcome(
        figures, 0, notes=["reaction: others take 0.9 of the link, then none"], headline=list(figures)
    )


def _stack(arena: Arena) -> Outcome:
    """Whole stacks, one after the other: without, with, without."""
    requests = list(islice(arena.workload.requests(), 40 if arena.context.quick else 96))
    sides = [("none-1", {}), ("pie", stack.with_pie(arena.ground)), ("none-2", {})]
    runs = {}
    with arena.context.progress("stacks", len(sides)) as bar:
        for name, settings in sides:
            bar.advance(0, now=name)
            runs[name] = stack.serve(arena.context, arena.ground, requests, settings, name)
            bar.advance()
    none = [runs["none-1"].served, runs["none-2"].served]
    pie = runs["pie"]
    rate = sum(each.requests_per_s for each in none) / 2
    latency_s = sum(stack.normalized_s(each) for each in none) / 2
    figures = {
        "stack_vs_none": pie.served.requests_per_s / rate,
        "stack_latency_vs_none": stack.normalized_s(pie.served) / latency_s,
        "stack_stall_share": float(pie.details["pie_stall_share"]),
        "stack_fifo_layers": float(pie.details["pie_fifo_layers"]),
    }
    rows = [
        (name, run.served.requests_per_s, run.served.tokens_per_s, stack.normalized_s(run.served) * 1e3)
        for name, run in runs.items()
    ]
    failures = sum(run.served.failures for run in runs.values())
    table = Table("stacks over HTTP", ("side", "requests/s", "tokens/s", "ms per token"), rows)
    return Outcome(figures, failures, [table], headline=list(figures))


def _layers(arena: Arena) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(arena.ground.model).num_hidden_layers)


def _failures(served: Sequence[Served]) -> int:
    return sum(each.failures for each in served)


def _table(title: str, served: Sequence[Served], layers: int) -> Table:
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
    rows = []
    for each in served:
        length = each.mean(lambda one: one.fifo_layers)
        rows.append(
            (
                each.name,
                f"{each.tokens_per_s:.0f}",
                f"{each.mean(lambda one: one.step_s) * 1e3:.1f}",
                f"{each.mean(lambda one: one.batch):.1f}",
                f"{each.mean(lambda one: one.stall_share):.4f}",
                f"{length:.1f}",
                f"{expansion(layers, round(length)):.2f}",
                f"{each.normalized_s * 1e3:.0f}",
                f"{each.first_s:.2f}",
                each.ended,
            )
        )
    return Table(title, columns, rows)
