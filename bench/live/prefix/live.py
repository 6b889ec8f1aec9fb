"""Part B of `python -m bench prefix`: whole stacks with and without the prefix cache.

It runs text analysis as in papers/002 §VII for each set of tiers and each order, and chats of many turns. One
core is for the engine, one for everything else. The stack without a cache goes first and last.
"""

import asyncio
import json
import shutil
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from bench.kit.context import Context
from bench.kit.cores import Cores
from bench.kit.load import LoadResult, Target, first_error
from bench.kit.models import checkpoint, vocabulary
from bench.kit.outcome import Outcome, Table, joined
from bench.kit.plots import draw_bars
from bench.kit.stacks import PLAIN, start_stack
from bench.live.prefix import workloads
from bench.live.prefix.workloads import BLOCK_TOKENS, Templates
from shared.errors import InternalError

_FLOAT_BYTES = 4
_MEBI = 1 << 20
NONE = "none"
TIERS = ("device", "device+host", "device+host+disk")
ORDERS = ("fcfs", "fpf", "relaxed_fpf")


@dataclass(frozen=True)
class TierCell:
    """One configuration of a stack; without tiers it has no prefix cache."""

    tiers: str
    order: str = "fcfs"
    prefetch: bool = True

    @property
    def name(self) -> str:
        if self.tiers == NONE:
            return NONE
        return f"{self.tiers} {self.order}{'' if self.prefetch else ' no-prefetch'}"

    def settings(self, shape: Templates, block_bytes: int, folder: Path) -> dict[str, object]:
        """Return the stack's settings; `folder` has the disk tier."""
        if self.tiers == NONE:
            return {"worker.prefix_cache.enabled": False, "placement.order": self.order}
        found: dict[str, object] = {
            "worker.prefix_cache.enabled": True,
            "worker.host_memory.cache_share": float("host" in self.tiers),
            "placement.order": self.order,
            "worker.prefix_cache.lookahead_sequences": 64 if self.prefetch else 0,
        }
        if "host" in self.tiers:
            found["worker.host_memory.blocks"] = shape.host * shape.prefix_blocks
        if "disk" in self.tiers:
            disk_bytes = shape.disk * shape.prefix_blocks * block_bytes
            found["worker.prefix_cache.disk_mb"] = -(-disk_bytes // _MEBI) + 1
            found["worker.prefix_cache.disk_path"] = str(folder)
        return found


def cells(*, quick: bool) -> list[TierCell]:
    """Return the cells, the one without a cache first; prefetching matters only with a disk."""
    if quick:
        return [TierCell(NONE), TierCell(TIERS[-1])]
    with_orders = [TierCell(tiers, order) for tiers in TIERS for order in ORDERS]
    return [
        TierCell(NONE),
        *with_orders,
        *(TierCell(TIERS[-1], order, prefetch=False) for order in ORDERS[:2]),
    ]


def block_bytes(model: Path) -> int:
    """Return the bytes of K and V of one block over all layers, in float32. Raises KeyError for another
    config."""
    config = json.loads((model / "config.json").read_text())
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_hidden_layers"] * 2 * heads * head * BLOCK_TOKENS * _FLOAT_BYTES)


PAPER_FACTOR = 2.0
"""Speedup in papers/002's abstract; its figures have no numbers."""
_AT_ONCE = 64

T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """One measurement of one cell."""

    cell: TierCell
    served: LoadResult
    hits: Mapping[str, int]
    """Blocks by tier."""


def run(context: Context) -> Outcome:
    """Run the part. Raises ConfigError if there is only one core, InternalError if a stack does not serve."""
    cores = Cores.choose()
    model = checkpoint(context.arguments.model)
    stacks = Stacks(context, model, cores)
    parts: list[Outcome] = []
    if "text" in context.arguments.workloads:
        parts.append(_text_outcome(context, _analyse_all(context, stacks)))
    if "chat" in context.arguments.workloads:
        parts.append(_chat_outcome(_talk_all(context, stacks)))
    return joined(parts)


class Stacks:
    """Starts stacks one after the other, each for one measurement."""

    def __init__(self, context: Context, model: Path, cores: Cores) -> None:
        self._context = context
        self._model = model
        self._cores = cores
        self._count = 0
        self.vocabulary = vocabulary(model)
        self.block_bytes = block_bytes(model)

    def measure(
        self, kv_blocks: int, settings: Mapping[str, object], load: Callable[[Target], Coroutine[Any, Any, T]]
    ) -> tuple[T, dict[str, int]]:
        """Return the result of `load` on a new stack with these settings, and the hits by tier."""
        self._count += 1
        whole = {
            **PLAIN,
            "worker.cores": [self._cores.engine],
            "worker.kv_blocks": kv_blocks,
            "scheduler.max_batch_sequences": _AT_ONCE,
            **settings,
        }
        folder = self.folder.with_name(f"stack-{self._count}")
        try:
            with start_stack(folder, whole, model=self._model) as stack:
                stack.confine(self._cores)
                with self._cores.client():
                    result = asyncio.run(load(stack.target))
                rows = stack.details("engine_s").get("prefix_tiers", [])
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        return result, {row["tier"]: int(row["hits"]) for row in rows}

    @property
    def folder(self) -> Path:
        """Folder of the disk tier, empty at every start."""
        return self._context.run_dir.resolve() / "kv"


def _analyse_all(context: Context, stacks: Stacks) -> list[Measured]:
    shape = workloads.QUICK if context.quick else workloads.Templates()
    requests = workloads.requests_of(shape, stacks.vocabulary, context.random("text"))
    todo = cells(quick=context.quick)
    todo = [cell for cell in todo if cell.tiers in (NONE, *context.arguments.tiers)]
    if not context.quick:
        todo = [*todo, TierCell(NONE)]
    done: list[Measured] = []
    with context.progress("text analysis", len(todo)) as progress:
        for cell in todo:
            progress.advance(0, now=cell.name)
            served, hits = stacks.measure(
                shape.device_blocks,
                cell.settings(shape, stacks.block_bytes, stacks.folder),
                lambda target, warm=cell.tiers != NONE: workloads.analyse(target, requests, shape, warm=warm),  # type: ignore[misc]
            )
            _check(served)
            if cell.tiers == TIERS[-1] and not served.cached_share:
                raise InternalError(f"{cell.name}: every prefix was seen before and none was found")
            done.append(Measured(cell, served, hits))
            context.record(
                {
                    "cell": cell.name,
                    "elapsed_s": served.elapsed_s,
                    "cached_share": served.cached_share,
                    "hits": hits,
                }
            )
            progress.advance()
    return done


def _talk_all(context: Context, stacks: Stacks) -> dict[str, list[workloads.Talked]]:
    """Measure the chats, with sides in turns."""
    shape = workloads.QUICK_CHATS if context.quick else workloads.Chats()
    sides: dict[str, dict[str, object]] = {
        "without": {"worker.prefix_cache.enabled": False},
        "with": {
            "worker.prefix_cache.enabled": True,
            "worker.host_memory.blocks": shape.host_blocks,
            "worker.host_memory.cache_share": 1,
        },
    }
    talks: dict[str, list[workloads.Talked]] = {name: [] for name in sides}
    times = 1 if context.quick else 2
    with context.progress("chats", times * len(sides)) as progress:
        for turn in range(times):
            for name in sorted(sides, reverse=turn % 2 == 0):
                talked, _ = stacks.measure(
                    shape.kv_blocks,
                    sides[name],
                    lambda target: workloads.talk(target, shape, context.random("chats")),
                )
                _check(talked.served)
                talks[name].append(talked)
                context.record({"chats": name, "elapsed_s": talked.served.elapsed_s})
                progress.advance()
    return talks


def _check(served: LoadResult) -> None:
    if served.failures == len(served.answers):
        raise InternalError(f"no request was answered: {first_error(served.answers)}")


def _ratios(measured: list[Measured]) -> dict[str, float]:
    """Return requests per second relative to no cache, as medians by cell."""
    rates: dict[str, list[float]] = {}
    for one in measured:
        rates.setdefault(one.cell.name, []).append(one.served.requests_per_s)
    base = median(rates[NONE])
    return {name: median(found) / base for name, found in rates.items()}


def _text_outcome(context: Context, measured: list[Measured]) -> Outcome:
    ratios = _ratios(measured)
    with_cache = {name: ratio for name, ratio in ratios.items() if name != NONE}
    unit = "throughput / throughput without a prefix cache"
    series = {"live; dashed: the paper's": list(with_cache.values())}
    draw_bars(
        context.picture("text_analysis"), "text analysis", unit, list(with_cache), series, dashed=PAPER_FACTOR
    )
    full = [ratios[one.cell.name] for one in measured if one.cell.tiers == TIERS[-1]]
    best = {"text_throughput_vs_none": max(full)} if full else {}
    return Outcome(
        figures={**best, **{f"text_vs_none_{_key(name)}": ratio for name, ratio in with_cache.items()}},
        failures=sum(one.served.failures for one in measured),
        tables=[_text_table(measured, ratios)],
        notes=[
            f"the paper states {PAPER_FACTOR:g}x for text analysis (its figures give no numbers to read)",
            "text_throughput_vs_none: all tiers, the best order",
        ],
        headline=[*best, *(f"text_vs_none_{_key(name)}" for name in with_cache)],
    )


def _chat_outcome(talks: Mapping[str, list[workloads.Talked]]) -> Outcome:
    rate = {name: median(one.served.requests_per_s for one in found) for name, found in talks.items()}
    first = {name: median(one.later_first_s for one in found) for name, found in talks.items()}
    share = {name: median(one.served.cached_share for one in found) for name, found in talks.items()}
    rows = [
        [name, rate[name], rate[name] / rate["without"], first[name] * 1e3, share[name]]
        for name in ("without", "with")
    ]
    columns = ("cache", "turns/s", "vs none", "TTFT ms, later turns", "prompt cached")
    return Outcome(
        figures={
            "chat_throughput_vs_none": rate["with"] / rate["without"],
            "chat_later_ttft_vs_none": first["with"] / first["without"],
            "chat_cached_share": share["with"],
        },
        failures=sum(one.served.failures for found in talks.values() for one in found),
        tables=[Table("chats of many turns, live", columns, rows)],
        notes=["the paper saw no gain for chat: its cache could not grow with a conversation"],
        headline=["chat_throughput_vs_none", "chat_later_ttft_vs_none"],
    )


def _text_table(measured: list[Measured], ratios: Mapping[str, float]) -> Table:
    rows = []
    for one in measured:
        hits = [one.hits.get(tier, 0) for tier in ("device", "host", "disk")]
        latest = median(answer.ended_s - answer.sent_s for answer in one.served.answers if answer.ok)
        cached = one.served.cached_share
        rows.append([one.cell.name, one.served.requests_per_s, ratios[one.cell.name], cached, latest, *hits])
    columns = ("tiers, order", "requests/s", "vs none", "prompt cached", "latency s p50")
    return Table("text analysis, live", (*columns, "device hits", "host hits", "disk hits"), rows)


def _key(name: str) -> str:
    return name.replace("+", "_").replace(" ", "_").replace("-", "_")
