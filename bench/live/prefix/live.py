"""Part B of `python -m bench prefix`: whole stacks with and without the prefix cache.

Text analysis as in papers/002 §VII, for each combination of tiers and each order, and chats of many turns.
One core for the engine, one for everything else. The stack without a cache goes first and last.
"""

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from bench.kit.context import Context
from bench.kit.cores import Cores
from bench.kit.load import Target, first_error
from bench.kit.models import checkpoint, vocabulary
from bench.kit.outcome import Outcome, Table, joined
from bench.kit.provenance import ROOT
from bench.kit.stacks import start
from bench.live.prefix import chat, pictures, text
from bench.live.prefix.cells import NONE, TIERS, TierCell, block_bytes, cells
from bench.live.prefix.load import LoadResult
from shared.errors import InternalError

PAPER_FACTOR = 2.0
"""What papers/002 states (abstract; the values of its figures are pictures only)."""
_AT_ONCE = 64

T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """One cell, once."""

    cell: TierCell
    served: LoadResult
    hits: Mapping[str, int]
    """Blocks, by tier."""


def run(context: Context) -> Outcome:
    """Raises ConfigError on a machine of one core, InternalError when a stack does not serve."""
    cores = Cores.choose()
    cores.bind_client()
    model = checkpoint(context.arguments.model, ROOT / "runs" / "bench" / "checkpoints")
    stacks = Stacks(context, model, cores)
    parts: list[Outcome] = []
    if "text" in context.arguments.workloads:
        parts.append(_text_outcome(context, _analyse_all(context, stacks)))
    if "chat" in context.arguments.workloads:
        parts.append(_chat_outcome(_talk_all(context, stacks)))
    return joined(parts)


class Stacks:
    """Starts one after the other, each for one measurement."""

    def __init__(self, context: Context, model: Path, cores: Cores) -> None:
        self._context = context
        self._model = model
        self._engine_core = cores.engine
        self._count = 0
        self.vocabulary = vocabulary(model)
        self.block_bytes = block_bytes(model)

    def measure(
        self,
        kv_blocks: int,
        settings: Mapping[str, object],
        load: Callable[[Target], Coroutine[Any, Any, T]],
    ) -> tuple[T, dict[str, int]]:
        """What `load` says of a new stack with these settings, and where blocks were found."""
        self._count += 1
        folder = self.folder.with_name(f"stack-{self._count}")
        stack = start(self._model, self._engine_core, kv_blocks, _AT_ONCE, folder, settings)
        try:
            result = asyncio.run(load(stack.target))
            rows = stack.details("engine_s").get("prefix_tiers", [])
        finally:
            stack.side.end()
            shutil.rmtree(self.folder, ignore_errors=True)
        return result, {row["tier"]: int(row["hits"]) for row in rows}

    @property
    def folder(self) -> Path:
        """Of the disk tier; empty at every start."""
        return self._context.run_dir.resolve() / "kv"


def _analyse_all(context: Context, stacks: Stacks) -> list[Measured]:
    shape = text.QUICK if context.quick else text.Templates()
    requests = text.requests_of(shape, stacks.vocabulary, context.random("text"))
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
                lambda target, warm=cell.tiers != NONE: text.analyse(target, requests, shape, warm=warm),  # type: ignore[misc]
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


def _talk_all(context: Context, stacks: Stacks) -> dict[str, list[chat.Talked]]:
    """Sides take turns."""
    shape = chat.QUICK if context.quick else chat.Chats()
    sides: dict[str, dict[str, object]] = {
        "without": {"worker.prefix_cache.enabled": "false"},
        "with": {
            "worker.prefix_cache.enabled": "true",
            "worker.prefix_cache.host_mb": 0,
            "worker.prefix_cache.host_blocks": shape.host_blocks,
        },
    }
    talks: dict[str, list[chat.Talked]] = {name: [] for name in sides}
    times = 1 if context.quick else 2
    with context.progress("chats", times * len(sides)) as progress:
        for turn in range(times):
            for name in sorted(sides, reverse=turn % 2 == 0):
                talked, _ = stacks.measure(
                    shape.kv_blocks,
                    sides[name],
                    lambda target: chat.talk(target, shape, context.random("chats")),
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
    """Requests per second over those without a cache, by cell; medians where there are several."""
    rates: dict[str, list[float]] = {}
    for one in measured:
        rates.setdefault(one.cell.name, []).append(one.served.requests_per_s)
    base = median(rates[NONE])
    return {name: median(found) / base for name, found in rates.items()}


def _text_outcome(context: Context, measured: list[Measured]) -> Outcome:
    ratios = _ratios(measured)
    with_cache = {name: ratio for name, ratio in ratios.items() if name != NONE}
    pictures.draw_throughput(
        context.picture("text_analysis"), "text analysis, live", with_cache, PAPER_FACTOR
    )
    full = [ratios[one.cell.name] for one in measured if one.cell.tiers == TIERS[-1]]
    best = {"text_throughput_vs_none": max(full)} if full else {}
    return Outcome(
        figures={
            **best,
            **{f"text_vs_none_{_key(name)}": ratio for name, ratio in with_cache.items()},
        },
        failures=sum(one.served.failures for one in measured),
        tables=[_text_table(measured, ratios)],
        notes=[
            f"the paper states {PAPER_FACTOR:g}x for text analysis (its figures give no numbers to read)",
            "text_throughput_vs_none: all tiers, the best order",
        ],
        headline=[*best, *(f"text_vs_none_{_key(name)}" for name in with_cache)],
    )


def _chat_outcome(talks: Mapping[str, list[chat.Talked]]) -> Outcome:
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
