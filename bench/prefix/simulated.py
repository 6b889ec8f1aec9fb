"""Hit rates of `python -m bench prefix`: each order of eviction at several cache sizes, against Belady."""

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence

from bench.context import Context
from bench.datasets.sources import find
from bench.outcome import Outcome, Table
from bench.prefix.replay import BELADY, Sizes, replay
from bench.prefix.trace import PRESETS, Chain, generate, infinite_hit_rate, read_mooncake
from services.worker.kv.cache import Tiers
from shared.errors import ConfigError

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


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--trace",
        choices=("auto", "mooncake", *PRESETS),
        default="auto",
        help="auto: mooncake's if it is there, else chats [%(default)s]",
    )
    parser.add_argument("--sizes", nargs="+", type=int, metavar="BLOCKS", help="of the cache, in one tier")


def run(context: Context) -> Outcome:
    """Failures: sizes at which our order does not find more than LRU."""
    name, trace = load_trace(context)
    sizes = context.arguments.sizes or (_QUICK_SIZES if context.quick else _SIZES)
    tiered = _QUICK_TIERED if context.quick else _TIERED
    cells = [Sizes(size) for size in sizes] + list(tiered)
    rates: dict[Sizes, Rates] = {}
    with context.progress("replays", len(cells) * len(POLICIES)) as progress:
        for cell in cells:
            rates[cell] = {}
            for policy in POLICIES:
                progress.advance(now=f"{cell.device} {policy}")
                replayed = replay(trace, cell, policy, seed=context.seed)
                rates[cell] = {**rates[cell], policy: replayed.hit_rate}
                context.record({"trace": name, "policy": policy, "sizes": cell, "found": replayed.found})
    return outcome_of(name, infinite_hit_rate(trace), rates)


def load_trace(context: Context) -> tuple[str, list[Chain]]:
    """Its name and its requests. Raises ConfigError where a trace was asked for that is not there."""
    wanted: str = context.arguments.trace
    file = find(MOONCAKE) if wanted in ("auto", "mooncake") else None
    if wanted == "mooncake" and file is None:
        raise ConfigError(f"{MOONCAKE} is not there: `python -m bench data`, or --trace chats")
    most = _QUICK_REQUESTS if context.quick else _REQUESTS
    if file is not None:
        trace = read_mooncake(file)
        return "mooncake", trace[:most] if context.quick else trace
    name = "chats" if wanted == "auto" else wanted
    return name, generate(PRESETS[name], most, context.random(name))


def outcome_of(trace: str, infinite: float, rates: Mapping[Sizes, Rates]) -> Outcome:
    """Figures and the table; rates are shares of the blocks asked for."""
    figures = {"hit_rate_infinite": infinite}
    rows: list[Sequence[object]] = []
    for sizes, found in rates.items():
        label = _label(sizes)
        figures |= {f"hit_rate_{policy}_{label}": rate for policy, rate in found.items()}
        gap = found[BELADY] - found["lru"]
        closed = (found[OURS] - found["lru"]) / gap if gap > 0 else 1.0
        figures[f"gap_to_belady_closed_{label}"] = closed
        rows.append([label, *(found[policy] for policy in POLICIES), closed])
    behind = [_label(sizes) for sizes, found in rates.items() if found[OURS] <= found["lru"]]
    figures["least_gain_over_lru"] = min(found[OURS] / found["lru"] for found in rates.values())
    columns = ("blocks", *POLICIES, "closed")
    return Outcome(
        figures=figures,
        failures=len(behind),
        tables=[Table(f"hit rate on {trace} (infinite cache: {infinite:.4f})", columns, rows)],
        notes=[
            "closed: share of the way from LRU to Belady's order, which knows the future",
            "one request at a time, each kept whole; several tiers as device+host+disk",
            *(f"not better than LRU at {label}" for label in behind),
        ],
        simulated=True,
        headline=[name for name in figures if name.startswith((f"hit_rate_{OURS}", "hit_rate_lru"))],
    )


def _label(sizes: Sizes) -> str:
    tiers = [sizes.device, sizes.host, sizes.disk]
    return "+".join(str(blocks) for blocks in tiers if blocks)
