"""Part A of `python -m bench prefix`: a trace against each order of eviction at several cache sizes.

What is replayed are the cache's own books and orders, one request after the other, without bytes. Belady's
order knows the future and is the bound.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.context import Context
from bench.datasets.sources import find
from bench.outcome import Outcome, Table
from bench.prefix import pictures
from bench.prefix.replay import BELADY, Replayed, Sizes, replay
from bench.prefix.trace import PRESETS, Chain, generate, infinite_hit_rate, read_mooncake
from services.worker.kv.cache import Tiers
from shared.errors import ConfigError
from sim.sweep import sweep

MOONCAKE = "mooncake/conversation_trace.jsonl"
OURS = Tiers().eviction
POLICIES = (OURS, "lru", "fifo", "random", BELADY)
_SIZES = (500, 1000, 2000, 5000, 10000, 20000, 50000)
_QUICK_SIZES = (1000, 5000)
_REQUESTS = 12000
_QUICK_REQUESTS = 2000
_TIERED = (Sizes(500, 2000, 7500), Sizes(1000, 4000, 15000))
_QUICK_TIERED = (Sizes(300, 800, 2500),)

Rates = Mapping[str, float]
"""Hit rate by policy."""
Job = tuple[Sizes, str]


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival, and where they are from."""

    name: str
    chains: Sequence[Chain]


def run(context: Context) -> Outcome:
    """Failures: sizes at which our order does not find more than LRU, though Belady's would."""
    trace = load_trace(context)
    sizes = context.arguments.sizes or (_QUICK_SIZES if context.quick else _SIZES)
    cells = [Sizes(size) for size in sizes] + list(_QUICK_TIERED if context.quick else _TIERED)
    rates: dict[Sizes, dict[str, float]] = {cell: {} for cell in cells}
    jobs = [(cell, policy) for cell in cells for policy in POLICIES]
    with context.progress(f"replays of {trace.name}", len(jobs)) as progress:

        def note(job: Job, replayed: Replayed) -> None:
            cell, policy = job
            rates[cell][policy] = replayed.hit_rate
            context.record({"trace": trace.name, "policy": policy, "sizes": cell, "found": replayed.found})
            progress.advance()

        replays = partial(_replay, trace.chains, context.seed)
        sweep(replays, jobs, processes=context.arguments.processes, on_result=note)
    infinite = infinite_hit_rate(trace.chains)
    pictures.draw_rates(
        context.picture("hit_rates"),
        f"{trace.name}: blocks found",
        [(cell.device, rates[cell]) for cell in cells if not cell.host],
        infinite,
    )
    return outcome_of(trace.name, infinite, rates)


def load_trace(context: Context) -> Trace:
    """Raises ConfigError where a trace was asked for that is not there or is none."""
    wanted: str = context.arguments.trace
    most = _QUICK_REQUESTS if context.quick else _REQUESTS
    if wanted in PRESETS:
        return Trace(wanted, generate(PRESETS[wanted], most, context.random(wanted)))
    file = find(MOONCAKE) if wanted in ("auto", "mooncake") else Path(wanted)
    if file is None and wanted == "auto":
        return Trace("chats", generate(PRESETS["chats"], most, context.random("chats")))
    if file is None or not file.is_file():
        raise ConfigError(f"there is no trace {wanted}: `python -m bench data`, or --trace chats")
    try:
        chains = read_mooncake(file)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{file} is no trace of requests with hash_ids: {error}", param="trace") from error
    return Trace(
        "mooncake" if wanted in ("auto", "mooncake") else file.stem,
        chains[:most] if context.quick else chains,
    )


def outcome_of(trace: str, infinite: float, rates: Mapping[Sizes, Rates]) -> Outcome:
    """Figures and the table; rates are shares of the blocks asked for."""
    figures = {"hit_rate_infinite": infinite}
    rows: list[Sequence[object]] = []
    for sizes, found in rates.items():
        label = _label(sizes)
        gap = found[BELADY] - found["lru"]
        closed = (found[OURS] - found["lru"]) / gap if gap > 0 else 1.0
        figures |= {f"hit_rate_{policy}_{label}": rate for policy, rate in found.items()}
        figures[f"hit_vs_infinite_{label}"] = found[OURS] / infinite
        figures[f"hit_vs_lru_{label}"] = found[OURS] / found["lru"]
        figures[f"hit_vs_belady_{label}"] = found[OURS] / found[BELADY]
        rows.append([label, *(found[policy] for policy in POLICIES), found[OURS] / found["lru"], closed])
    figures |= _summary(infinite, rates)
    behind = [_label(sizes) for sizes, found in rates.items() if found[OURS] <= found["lru"] < found[BELADY]]
    return Outcome(
        figures=figures,
        failures=len(behind),
        tables=[
            Table(
                f"simulated: hit rate on {trace} (infinite cache: {infinite:.4f})",
                ("blocks", *POLICIES, "ours/lru", "closed"),
                rows,
            )
        ],
        notes=[
            "closed: share of the way from LRU to Belady's order, which knows the future",
            "one request at a time, each kept whole; several tiers as device+host+disk",
            *(f"not better than LRU at {label}" for label in behind),
        ],
        simulated=True,
        headline=["hit_rate", "hit_vs_infinite", "hit_vs_lru"],
    )


def _summary(infinite: float, rates: Mapping[Sizes, Rates]) -> dict[str, float]:
    """`hit_rate` and its share of the infinite cache's: at the middle size; `hit_vs_lru`: the worst size."""
    single = sorted((sizes for sizes in rates if not sizes.host), key=lambda sizes: sizes.device)
    middle = rates[single[len(single) // 2]][OURS]
    return {
        "hit_rate": middle,
        "hit_vs_infinite": middle / infinite,
        "hit_vs_lru": min(found[OURS] / found["lru"] for found in rates.values()),
    }


def _replay(chains: Sequence[Chain], seed: int, job: Job) -> Replayed:
    return replay(chains, *job, seed=seed)


def _label(sizes: Sizes) -> str:
    tiers = [sizes.device, sizes.host, sizes.disk]
    return "+".join(str(blocks) for blocks in tiers if blocks)
