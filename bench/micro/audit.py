"""`python -m bench audit`: what the checks of KV cost, as a share of the work that contains them.

`cost_share` is the largest share of a request: all KV lent, with queries shipped or blocks fetched for the
prompt, or the prompt loaded from host or disk. The checks are timed alone, on the same bytes, after the work.
"""

import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from time import perf_counter

import msgspec
import numpy as np
import torch

from bench.kit.context import Context
from bench.kit.cores import Cores
from bench.kit.models import checkpoint
from bench.kit.outcome import Outcome, Table
from bench.kit.stats import with_interval
from bench.micro.distattention.creditor import GRANT, fill, lenders, make_attention, settings_of
from services.worker.core.sampling import SamplePoint
from services.worker.engine.backends import NativeBackend, PartialBackend
from services.worker.engine.contract import Row
from services.worker.engine.engine import TorchEngine
from services.worker.engine.loading import LoadedModel, load
from services.worker.engine.native import library as native
from services.worker.engine.native.sums import checksums
from services.worker.engine.paged import Shape
from services.worker.engine.spans import Span, pack
from services.worker.kv.core.radix_tree import Tier
from services.worker.kv.core.tier_copier import Load, Store, StoredBlock
from services.worker.kv.tiers.copier import TierMover
from services.worker.kv.tiers.disk import Geometry, open_disk
from services.worker.kv.tiers.host import HostTier
from services.worker.kv.tiers.records import records_of
from services.worker.kv.transfers import TransferEngine
from services.worker.peers.attention.core.cost import ShipMode
from services.worker.peers.attention.debtor import AttendingDebtor
from services.worker.peers.attention.memory import NativeSeals
from services.worker.peers.transport.base import bytes_of
from services.worker.peers.transport.digest import digest
from shared.errors import InternalError
from shared.messages.sequence import Sampling

_ANSWER = 32
BLOCK_TOKENS = 16
_REPEATS = 15
_CHUNK_TOKENS = 256
_EVER_S = 1e9
_NAME, _FINGERPRINT = b"n" * 16, b"0123456789abcdef"


@dataclass(frozen=True)
class Cost:
    """Seconds of one turn."""

    work_s: float
    """Work including the checks."""
    check_s: float


def timed(call: Callable[[], object]) -> float:
    began_s = perf_counter()
    call()
    return perf_counter() - began_s


def usual(call: Callable[[], object]) -> float:
    """Return the median of some runs."""
    return median(timed(call) for _ in range(_REPEATS))


def answers_over_lent_blocks(
    model: LoadedModel, core: int, mode: ShipMode, *, batch: int, context: int, answer: int, turns: int
) -> tuple[list[Cost], list[Cost]]:
    """Measure whole requests, and a decode step of all, with all blocks at one creditor on another core.
    Prompts use `mode`; decodes ship queries."""
    each = -(-(context + 1) // BLOCK_TOKENS)
    settings = settings_of(model, batch * each, core, BLOCK_TOKENS)
    chosen = mode
    requests, steps = [], []
    with lenders([settings]) as (link,):
        engine = TorchEngine(model, kv_blocks=1, block_tokens=BLOCK_TOKENS)
        debtor = AttendingDebtor(
            engine.attention,
            q_heads=engine.q_heads,
            own_blocks=1,
            block_tokens=BLOCK_TOKENS,
            staging_blocks=64,
            deadline_s=30.0,
            choose=lambda work, speeds: chosen,
        )
        debtor.homes.place(range(1, 1 + batch * each), debtor.add(link, [GRANT]), range(batch * each))
        tables = [range(1 + at * each, 1 + (at + 1) * each) for at in range(batch)]
        decode = [Row([5], context, table, _point([5] * (context + 1))) for table in tables]
        chunks = [
            Row([5] * min(_CHUNK_TOKENS, context - first), first, tables[0], None)
            for first in range(0, context, _CHUNK_TOKENS)
        ]
        bench = _Checks(settings.layers, batch * each, engine.q_heads)
        for turn in range(turns + 1):
            chosen = mode
            rows = [msgspec.structs.replace(row, blocks=table) for table in tables for row in chunks]
            work_s = sum(timed(partial(engine.step, [row])) for row in rows)
            chosen = ShipMode.SHIP
            step_s = usual(lambda: engine.step(decode))
            chunk_s = sum(
                bench.fetched_s(row) if mode is ShipMode.FETCH else bench.shipped_s([row]) for row in chunks
            )
            decode_s = bench.shipped_s(decode)
            if turn:
                requests.append(Cost(work_s + answer * step_s, batch * chunk_s + answer * decode_s))
                steps.append(Cost(step_s, decode_s))
        debtor.close()
    return requests, steps


class _Checks:
    """The checks of a step alone, over all layers, on as many blocks of the same shape."""

    def __init__(self, layers: Sequence[tuple[int, int, int]], blocks: int, q_heads: int) -> None:
        library = native.load()
        self._layers, self._q_heads = layers, q_heads
        attention = make_attention(layers[:1], blocks, BLOCK_TOKENS)
        fill(attention, 0, blocks, seed=1)
        self._pools = attention.pools
        self._sealed = NativeSeals(library, self._pools, 1)
        self._plain = NativeBackend(library, self._pools, 1)
        slots = torch.arange(blocks * BLOCK_TOKENS)
        self._sealed.write(0, *self._new(len(slots)), slots)

    def shipped_s(self, rows: Sequence[Row]) -> float:
        """Return the creditor's time for checks while it writes and attends."""
        spans = [Span(row.first_position, len(row.tokens), [at - 1 for at in row.blocks]) for row in rows]
        packed = pack(spans, BLOCK_TOKENS)
        count = len(packed.slots)
        queries, slots = torch.randn(count, self._q_heads, self._layers[0][1]), torch.from_numpy(packed.slots)
        new = self._new(count)

        def attended(backend: PartialBackend) -> float:
            def run() -> None:
                backend.write(0, *new, slots)
                backend.attend_part(0, packed, queries, Shape(0.125))

            return timed(run)

        longer = [attended(self._sealed) - attended(self._plain) for _ in range(_REPEATS)]
        return max(0.0, median(longer)) * len(self._layers)

    def fetched_s(self, row: Row) -> float:
        """Return the checks of a fetched chunk: verification of its context, and a digest at both ends."""
        blocks = -(-row.first_position // BLOCK_TOKENS)
        payload = [bytes_of(pool[:blocks]) for pool in self._pools[0]] if blocks else []
        named = np.arange(blocks, dtype=np.int32)
        new, slots = self._new(len(row.tokens)), torch.arange(len(row.tokens))
        written_s = usual(lambda: self._sealed.write(0, *new, slots))
        written_s -= usual(lambda: self._plain.write(0, *new, slots))
        self._sealed.write(0, *new, slots)
        sent_s = usual(lambda: self._sealed.verify(0, named)) + 2 * usual(lambda: digest(payload))
        return (max(0.0, written_s) + sent_s) * len(self._layers)

    def _new(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values that are the same for all rows, so that rewriting them changes nothing."""
        heads, key, value = self._layers[0]
        return torch.full((rows, heads, key), 0.5), torch.full((rows, heads, value), 0.25)


def stored_prefixes(
    model: LoadedModel, folder: Path, tier: Tier, *, blocks: int, answer: int, turns: int
) -> list[Cost]:
    """Measure a prompt whose blocks are stored to a tier and loaded for another answer of `answer` tokens."""
    engine = TorchEngine(model, kv_blocks=2 * blocks, block_tokens=BLOCK_TOKENS)
    records = records_of(engine.pools)
    host = HostTier(blocks, records.record_bytes, _FINGERPRINT, checksums())
    geometry = Geometry(_FINGERPRINT, records.record_bytes, blocks)
    disk = open_disk(folder / f"costs-{tier.name}.kv", geometry, checksums())
    if disk is None:
        raise InternalError(f"no disk tier in {folder}: see the log")
    transfers = TransferEngine(lambda: None)
    mover = TierMover(transfers, records, host, disk)
    table = list(range(blocks + -(-answer // BLOCK_TOKENS)))
    tokens = [5] * (blocks * BLOCK_TOKENS + answer)

    def work() -> None:
        mover.store([Store(_NAME, at, at) for at in range(blocks)])
        if tier is Tier.DISK:
            for at in range(blocks):
                disk.write(StoredBlock(_NAME, b"", at, at), host.row(at), host.checksum_of(at))
        loaded = mover.load([Load(_NAME, tier, at, at) for at in range(blocks)], _EVER_S)
        assert loaded.done == blocks
        for at in range(blocks * BLOCK_TOKENS, len(tokens)):
            engine.step([Row(tokens[at : at + 1], at, table, _point(tokens[: at + 1]))])

    def check() -> None:
        for _ in range(2):
            for at in range(blocks):
                checksums().of(host.row(at), _NAME, _FINGERPRINT)

    work()
    costs = [Cost(timed(work), usual(check)) for _ in range(turns)]
    transfers.halt(10.0)
    mover.close()
    return costs


def _point(tokens: list[int]) -> SamplePoint:
    return SamplePoint(Sampling(seed=0, max_tokens=1, temperature=0.0), 0, 0, tokens)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, default=15, help="of each cost [%(default)s]")
    parser.add_argument("--model", default="models/tiny_chat", help="whose steps are timed [%(default)s]")
    parser.add_argument("--batch", type=int, default=8, help="sequences over lent blocks [%(default)s]")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each [%(default)s]")


def run(context: Context) -> Outcome:
    """Run the bench. Raises ConfigError if there is only one core, or no C++ library."""
    flags = context.arguments
    turns = 3 if context.quick else flags.turns
    cores = Cores.choose()
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    cost_rows = []
    folder = str(checkpoint(flags.model))
    model = load(folder, dtype="float32", device="cpu")
    costs: dict[str, Sequence[Cost]] = {}
    with tempfile.TemporaryDirectory() as scratch, cores.client():
        for mode in ShipMode:
            sizes = {"batch": flags.batch, "context": flags.context, "answer": _ANSWER, "turns": turns}
            costs[f"lent_{mode}"], steps = answers_over_lent_blocks(model, cores.engine, mode, **sizes)
        for tier in (Tier.HOST, Tier.DISK):
            name = tier.name.lower()
            costs[name] = stored_prefixes(model, Path(scratch), tier, blocks=32, answer=_ANSWER, turns=turns)
    costs["decode"] = steps
    for name, found in costs.items():
        checks, works = [one.check_s for one in found], [one.work_s for one in found]
        shares = with_interval(f"cost_share_{name}", checks, works, _share)
        figures |= shares
        cost_rows.append((name, 1e3 * fmean(works), 1e3 * fmean(checks), *shares.values()))
    worst = max((name for name in costs if name != "decode"), key=lambda name: figures[f"cost_share_{name}"])
    figures |= {f"cost_share{end}": figures[f"cost_share_{worst}{end}"] for end in ("", "_low", "_high")}
    table = Table("checks", ("of", "work ms", "checks ms", "share", "low", "high"), cost_rows)
    notes = [
        f"lent: {flags.batch} prompts of {flags.context} tokens, {_ANSWER} answered, all at another worker",
        f"decode: one step of those; host, disk: 512 tokens stored, loaded, and {_ANSWER} tokens answered",
    ]
    headline = ("cost_share", "cost_share_low", "cost_share_high", "cost_share_decode")
    return Outcome(figures, 0, [table], notes, headline=headline)


def _share(checks_s: Sequence[float], works_s: Sequence[float]) -> float:
    return sum(checks_s) / sum(works_s)
