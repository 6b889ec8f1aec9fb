"""Chooses how each move of an epoch is made, by KV or by tokens, from worker measurements (papers/000 §V).

Workers report fetch rates per peer, prefill speed, utilization and waiting prompts. These give the budgets of
`divide`: bytes per link and prefill tokens per target within an epoch, less moves under way. A move that
exceeds both waits, but a target without other moves takes one of any size, so large moves never starve. Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Literal

from msgspec import structs

from shared.messages.moves import MoveMode, SequenceMove
from shared.messages.reports import SequenceState, WorkerReported
from shared.messages.sequence import SequenceRef

ModeChoice = Literal["adaptive", "kv", "tokens"]
LEAST_IDLE_SHARE = 0.1
"""Minimum share of a busy worker's time for rehearsals."""
_FORGET_S = 30.0
_UNMEASURED_BYTES_PER_S = 100e6
"""About the rate of a gigabit link."""


@dataclass(frozen=True, slots=True)
class Migration:
    """One move with its cost both ways: bytes over the link, or tokens to compute on the target."""

    name: str
    source: str
    target: str
    kv_bytes: int
    tokens: int


def divide(
    migrations: Iterable[Migration],
    link_bytes: Mapping[tuple[str, str], int],
    prefill_tokens: Mapping[str, int],
) -> dict[str, MoveMode | None]:
    """Return the mode of each move by name: the fitting one that takes the smaller share of its budget in
    this epoch, or None if neither fits. Missing links and workers have no budget.

    An example: a link carries 100 bytes an epoch, the target computes 50 tokens. A move of 80 bytes or 20
    tokens goes by tokens (40 % against 80 %). One of 60 bytes or 40 tokens goes by KV, as 30 tokens are left.
    A third of 50 bytes or 35 tokens waits.
    """
    links, workers = dict(link_bytes), dict(prefill_tokens)
    modes: dict[str, MoveMode | None] = {}
    for one in sorted(migrations, key=lambda each: (-each.kv_bytes, each.name)):
        way = (one.source, one.target)
        shares: dict[MoveMode, float] = {}
        if one.kv_bytes <= links.get(way, 0):
            shares[MoveMode.KV] = one.kv_bytes / link_bytes[way]
        if one.tokens <= workers.get(one.target, 0):
            shares[MoveMode.TOKENS] = one.tokens / prefill_tokens[one.target]
        mode = modes[one.name] = min(shares, key=shares.__getitem__, default=None)
        if mode is MoveMode.KV:
            links[way] -= one.kv_bytes
        elif mode is MoveMode.TOKENS:
            workers[one.target] -= one.tokens
    return modes


@dataclass(frozen=True, slots=True)
class WantedMove:
    """A move requested by the packing policy, before its mode and time are chosen."""

    order: SequenceMove
    source: str
    tokens: int
    """Tokens of prompt and answer so far."""


class MoveModes:
    """Chooses the mode of each wanted move, epoch by epoch, within the remaining budgets. Call `on_over` for
    every move that ended or was refused: until then it counts as under way."""

    def __init__(self, choice: ModeChoice, epoch_s: float) -> None:
        self._choice = choice
        self._epoch_s = epoch_s
        self._under_way: dict[SequenceRef, tuple[Migration, MoveMode, float]] = {}
        """With its mode and the time of its order."""
        self.counts = {"kv": 0, "tokens": 0, "later": 0}

    def divide(
        self, wanted_moves: Sequence[WantedMove], reports: Mapping[str, WorkerReported], now_s: float
    ) -> list[SequenceMove]:
        """Return the moves to order now, each with its mode. The others are for the next epoch."""
        for ref, (_, _, since_s) in list(self._under_way.items()):
            if now_s - since_s > _FORGET_S:
                del self._under_way[ref]
        migrations = [_migration(wanted, reports) for wanted in wanted_moves]
        modes = divide(migrations, *self._budgets(migrations, reports))
        now: list[SequenceMove] = []
        for wanted, one in zip(wanted_moves, migrations, strict=True):
            mode = self._mode(one, modes[one.name], reports)
            self.counts[mode or "later"] += 1
            if mode is not None:
                self._under_way[wanted.order.ref] = (one, mode, now_s)
                now.append(structs.replace(wanted.order, mode=mode))
        return now

    def on_over(self, ref: SequenceRef) -> None:
        """Release the budget of a move that ended or was refused."""
        self._under_way.pop(ref, None)

    def _budgets(
        self, migrations: Iterable[Migration], reports: Mapping[str, WorkerReported]
    ) -> tuple[dict[tuple[str, str], int], dict[str, int]]:
        """Return the bytes per link and the tokens per target of an epoch, less moves under way."""
        links: dict[tuple[str, str], int] = {}
        prefill: dict[str, int] = {}
        for one in migrations:
            links[one.source, one.target] = self._link_bytes(one, reports)
            prefill[one.target] = computable_tokens(reports.get(one.target), self._epoch_s)
        for busy, mode, _ in self._under_way.values():
            way = (busy.source, busy.target)
            if mode is MoveMode.KV and way in links:
                links[way] = max(0, links[way] - busy.kv_bytes)
            elif mode is MoveMode.TOKENS and busy.target in prefill:
                prefill[busy.target] = max(0, prefill[busy.target] - busy.tokens)
        return links, prefill

    def _link_bytes(self, one: Migration, reports: Mapping[str, WorkerReported]) -> int:
        source, target = reports.get(one.source), reports.get(one.target)
        if source is None or target is None or not source.kv_block_bytes:
            return 0
        if source.fingerprint != target.fingerprint:
            return 0
        return int(link_bytes_per_s(target, one.source) * self._epoch_s)

    def _mode(
        self, one: Migration, mode: MoveMode | None, reports: Mapping[str, WorkerReported]
    ) -> MoveMode | None:
        """Return the mode of a move, or None to postpone it."""
        if self._choice != "adaptive":
            return MoveMode(self._choice)
        if mode is not None or any(busy.target == one.target for busy, _, _ in self._under_way.values()):
            return mode
        # The mode that would finish first without other moves; tokens if nothing was measured.
        link = self._link_bytes(one, reports)
        tokens = computable_tokens(reports.get(one.target), self._epoch_s)
        by_link = one.kv_bytes / link if link else inf
        return MoveMode.KV if by_link < (one.tokens / tokens if tokens else inf) else MoveMode.TOKENS


def _migration(wanted: WantedMove, reports: Mapping[str, WorkerReported]) -> Migration:
    report = reports.get(wanted.source)
    kv_bytes = 0 if report is None else wanted.tokens // report.block_tokens * report.kv_block_bytes
    order = wanted.order
    return Migration(str(order.ref), wanted.source, order.target, max(1, kv_bytes), max(1, wanted.tokens))


def link_bytes_per_s(target: WorkerReported, source: str) -> float:
    """Return the rate at which a worker fetches KV from `source`. An unmeasured link counts as the median of
    its other links, or as a slow one."""
    measured = target.link_bytes_per_s.get(source)
    if measured is None:
        measured = median(target.link_bytes_per_s.values() or [_UNMEASURED_BYTES_PER_S])
    return measured


def computable_tokens(report: WorkerReported | None, epoch_s: float) -> int:
    """Return the tokens that a worker can compute for moves within an epoch; 0 if it is unknown."""
    if report is None:
        return 0
    waiting_tokens = sum(
        max(0, listed.prompt_tokens + listed.generated_tokens - listed.computed_tokens)
        for listed in report.sequences
        if listed.state in (SequenceState.WAITING, SequenceState.PREFILLING)
    )
    idle_share = max(LEAST_IDLE_SHARE, 1.0 - report.busy_share)
    return max(0, int(report.prefill_tokens_per_s * epoch_s * idle_share) - waiting_tokens)
