"""`python -m bench audit`: is every corruption detected before a token, and what do checks cost?

Corruptions are one or two bits, a byte, or a stretch of zeros, noise or other bytes. Equal parts go into host
slots, disk records, payloads between two workers, and lent blocks. `caught_share` is the share refused.
"""

import logging
import tempfile
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch

from bench.kit.context import Context
from bench.kit.cores import Cores
from bench.kit.models import checkpoint
from bench.kit.outcome import Outcome, Table
from bench.kit.stats import interval
from bench.micro.audit.costs import Cost, answers_over_lent_blocks, stored_prefixes
from bench.micro.audit.places import Frames, Lent, Place, Tiers, small_attention
from services.worker.engine.loading import load
from services.worker.kv.core.radix_tree import Tier
from services.worker.peers.attention.core.cost import ShipMode

_ANSWER = 32
_LAYERS, _SHAPE, _Q_HEADS = 4, (2, 64, 64), 4
"""Half of tiny_chat's layers."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--corruptions", type=int, default=10_000, help="in all places [%(default)s]")
    parser.add_argument("--turns", type=int, default=15, help="of each cost [%(default)s]")
    parser.add_argument("--model", default="models/tiny_chat", help="whose steps are timed [%(default)s]")
    parser.add_argument("--batch", type=int, default=8, help="sequences over lent blocks [%(default)s]")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each [%(default)s]")


def run(context: Context) -> Outcome:
    """Run the bench. Raises ConfigError if there is only one core, or no C++ library."""
    flags = context.arguments
    each = (400 if context.quick else flags.corruptions) // 4
    turns = 3 if context.quick else flags.turns
    cores = Cores.choose()
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    caught_rows, cost_rows = [], []
    logging.getLogger("kvasir.worker.creditor").setLevel(logging.CRITICAL)  # It logs every corruption.
    with tempfile.TemporaryDirectory() as scratch, context.progress("corruptions", 4 * each) as progress:
        caught = 0
        for name, place in _places(Path(scratch)):
            rng = Random(f"audit/{context.seed}/{name}")
            refused = sum(place.caught(rng) for _ in range(each))
            place.close()
            caught += refused
            caught_rows.append((name, each, refused))
            figures[f"missed_{name}"] = each - refused
            progress.advance(each)
    figures["caught_share"] = caught / (4 * each)
    context.say("what checking costs")
    folder = str(checkpoint(flags.model))
    model = load(folder, dtype="float32", device="cpu")
    costs: dict[str, Sequence[Cost]] = {}
    with tempfile.TemporaryDirectory() as scratch, cores.client():
        for mode in ShipMode:
            costs[f"lent_{mode}"], steps = answers_over_lent_blocks(
                model,
                cores.engine,
                mode,
                batch=flags.batch,
                context=flags.context,
                answer=_ANSWER,
                turns=turns,
            )
        for tier in (Tier.HOST, Tier.DISK):
            name = tier.name.lower()
            costs[name] = stored_prefixes(model, Path(scratch), tier, blocks=32, answer=_ANSWER, turns=turns)
    costs["decode"] = steps
    worst, bounds = 0.0, (0.0, 0.0)
    for name, found in costs.items():
        checks, works = [one.check_s for one in found], [one.work_s for one in found]
        share, ends = _share(checks, works), interval(checks, works, _share)
        figures[f"cost_share_{name}"] = share
        if name == "decode":
            figures[f"cost_share_{name}_low"], figures[f"cost_share_{name}_high"] = ends
        cost_rows.append((name, 1e3 * sum(works) / len(works), 1e3 * sum(checks) / len(checks), share, *ends))
        if name != "decode" and share >= worst:
            worst, bounds = share, ends
    figures["cost_share"], (figures["cost_share_low"], figures["cost_share_high"]) = worst, bounds
    tables = [
        Table("corruptions", ("in", "put there", "caught"), caught_rows),
        Table("checks", ("of", "work ms", "checks ms", "share", "low", "high"), cost_rows),
    ]
    notes = [
        f"lent: {flags.batch} prompts of {flags.context} tokens, {_ANSWER} answered, all at another worker",
        f"decode: one step of those; host, disk: 512 tokens stored, loaded, and {_ANSWER} tokens answered",
    ]
    headline = ("caught_share", "cost_share", "cost_share_low", "cost_share_high", "cost_share_decode")
    return Outcome(figures, 4 * each - caught, tables, notes, headline=headline)


def _share(checks_s: Sequence[float], works_s: Sequence[float]) -> float:
    return sum(checks_s) / sum(works_s)


def _places(folder: Path) -> list[tuple[str, Place]]:
    tiers = small_attention(2, _LAYERS, _SHAPE)
    return [
        ("host", Tiers(tiers, Tier.HOST, folder)),
        ("disk", Tiers(tiers, Tier.DISK, folder / "disk")),
        ("frames", Frames()),
        ("lent", Lent(small_attention(9, _LAYERS, _SHAPE), _Q_HEADS)),
    ]
