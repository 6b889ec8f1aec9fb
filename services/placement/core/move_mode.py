"""Chooses how each move of an epoch is made, by KV or by tokens, from worker measurements (papers/000 §V).

Workers report fetch rates per peer, prefill speed, utilization and waiting prompts. These give the budgets of
`divide`: bytes per link and prefill tokens per target within an epoch, less moves under way. A move that
exceeds both waits, but a target without other moves takes one of any size, so large moves never starve. An
unmeasured link counts as the median of the target's other links, or as a slow one. Pure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Literal

from shared.messages.moves import MoveMode, SequenceMove
from shared.messages.reports import SequenceState, WorkerReported
from shared.messages.sequence import SequenceRef


class Mode(StrEnum):
    """How a running sequence moves in this epoch, if at all."""

    KV = "kv"
    TOKENS = "tokens"
    LATER = "later"


@dataclass(frozen=True, slots=True)
class Migration:
    """One move with its cost both ways: bytes over the link, or tokens to compute on the target."""

    name: str
    source: str
    target: str
    kv_bytes: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Budget of links and prefilling workers for moves within one epoch; missing entries have none."""

    link_bytes: Mapping[tuple[str, str], int]
    prefill_tokens: Mapping[str, int]


def divide(migrations: Iterable[Migration], boundaries: Boundaries) -> dict[str, Mode]:
    """Return the mode of each move by name: the fitting one that takes the smaller share of its budget.

    An example: a link carries 100 bytes an epoch, the target computes 50 tokens. A move of 80 bytes or 20
    tokens goes by tokens (40 % against 80 %). One of 60 bytes or 40 tokens goes by KV, as 30 tokens are left.
    A third of 50 bytes or 35 tokens waits.
    """
    links, workers = dict(boundaries.link_bytes), dict(boundaries.prefill_tokens)
    modes: dict[str, Mode] = {}
    for one in sorted(migrations, key=lambda each: (-each.kv_bytes, each.name)):
        way = (one.source, one.target)
        shares = {
            Mode.KV: _share(one.kv_bytes, boundaries.link_bytes.get(way, 0)),
            Mode.TOKENS: _share(one.tokens, boundaries.prefill_tokens.get(one.target, 0)),
        }
        fits = {
            Mode.KV: one.kv_bytes <= links.get(way, 0),
            Mode.TOKENS: one.tokens <= workers.get(one.target, 0),
        }
        able = [mode for mode in (Mode.KV, Mode.TOKENS) if fits[mode]]
        mode = min(able, key=lambda each: shares[each], default=Mode.LATER)
        modes[one.name] = mode
        if mode is Mode.KV:
            links[way] -= one.kv_bytes
        elif mode is Mode.TOKENS:
            workers[one.target] -= one.tokens
    return modes


def _share(amount: int, boundary: int) -> float:
    return amount / boundary if boundary > 0 else float("inf")


ModeChoice = Literal["adaptive", "kv", "tokens"]
LEAST_IDLE_SHARE = 0.1
"""Minimum share of a busy worker's time for rehearsals."""
_FORGET_S = 30.0
UNMEASURED_BYTES_PER_S = 100e6
"""About the rate of a gigabit link."""


@dataclass(frozen=True, slots=True)
class MoveCosts:
    """A worker's measurements that determine the cost of moves from it or to it."""

    block_tokens: int = 0
    block_bytes: int = 0
    """0 if its blocks cannot be fetched."""
    fingerprint: bytes = b""
    link_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """Fetch rate by source worker."""
    prefill_tokens_per_s: float = 0.0
    busy_share: float = 0.0
    waiting_tokens: int = 0
    """Tokens of prompts there that are not computed yet."""

    @classmethod
    def of(cls, report: WorkerReported) -> "MoveCosts":
        """Return the values of a heartbeat."""
        unfinished = (SequenceState.WAITING, SequenceState.PREFILLING)
        return cls(
            block_tokens=report.block_tokens,
            block_bytes=report.kv_block_bytes,
            fingerprint=report.fingerprint,
            link_bytes_per_s=report.link_bytes_per_s,
            prefill_tokens_per_s=report.prefill_tokens_per_s,
            busy_share=report.busy_share,
            waiting_tokens=sum(
                max(0, listed.prompt_tokens + listed.generated_tokens - listed.computed_tokens)
                for listed in report.sequences
                if listed.state in unfinished
            ),
        )

    def prefill_tokens(self, epoch_s: float) -> int:
        """Return the tokens that it can compute for moves within an epoch."""
        idle_share = max(LEAST_IDLE_SHARE, 1.0 - self.busy_share)
        return max(0, int(self.prefill_tokens_per_s * epoch_s * idle_share) - self.waiting_tokens)


@dataclass(slots=True)
class _UnderWay:
    """A move that was ordered and still uses its part of a budget."""

    migration: Migration
    mode: MoveMode
    since_s: float


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
        self._under_way: dict[SequenceRef, _UnderWay] = {}
        self.counts: dict[str, int] = {"kv": 0, "tokens": 0, "later": 0}

    def divide(
        self, wanted_moves: Iterable[WantedMove], costs: Mapping[str, MoveCosts], now_s: float
    ) -> tuple[list[SequenceMove], list[SequenceMove]]:
        """Return the moves to order now, each with its mode, and the ones for the next epoch."""
        self._forget(now_s)
        listed = {str(wanted.order.ref): wanted for wanted in wanted_moves}
        migrations = {name: self._migration(name, wanted, costs) for name, wanted in listed.items()}
        boundaries = self._boundaries(migrations.values(), costs)
        modes = divide(migrations.values(), boundaries)
        now: list[SequenceMove] = []
        later: list[SequenceMove] = []
        for name, wanted in listed.items():
            mode = self._mode(migrations[name], modes[name], costs)
            if mode is None:
                later.append(wanted.order)
                self.counts["later"] += 1
                continue
            self._under_way[wanted.order.ref] = _UnderWay(migrations[name], mode, now_s)
            self.counts[str(mode)] += 1
            order = SequenceMove(ref=wanted.order.ref, target=wanted.order.target, mode=mode)
            now.append(order)
        return now, later

    def on_over(self, ref: SequenceRef) -> None:
        """Release the budget of a move that ended or was refused."""
        self._under_way.pop(ref, None)

    def _forget(self, now_s: float) -> None:
        for ref, one in list(self._under_way.items()):
            if now_s - one.since_s > _FORGET_S:
                del self._under_way[ref]

    def _migration(self, name: str, wanted: WantedMove, costs: Mapping[str, MoveCosts]) -> Migration:
        source = costs.get(wanted.source, MoveCosts())
        blocks = wanted.tokens // source.block_tokens if source.block_tokens else 0
        return Migration(
            name,
            wanted.source,
            wanted.order.target,
            max(1, blocks * source.block_bytes),
            max(1, wanted.tokens),
        )

    def _boundaries(self, migrations: Iterable[Migration], costs: Mapping[str, MoveCosts]) -> Boundaries:
        """Return the budgets of an epoch, less moves under way."""
        links: dict[tuple[str, str], int] = {}
        prefill: dict[str, int] = {}
        for one in migrations:
            links[one.source, one.target] = self._link_bytes(one.source, one.target, costs)
            prefill[one.target] = costs.get(one.target, MoveCosts()).prefill_tokens(self._epoch_s)
        for busy in self._under_way.values():
            way, target = (busy.migration.source, busy.migration.target), busy.migration.target
            if busy.mode is MoveMode.KV and way in links:
                links[way] = max(0, links[way] - busy.migration.kv_bytes)
            elif busy.mode is MoveMode.TOKENS and target in prefill:
                prefill[target] = max(0, prefill[target] - busy.migration.tokens)
        return Boundaries(links, prefill)

    def _link_bytes(self, source: str, target: str, costs: Mapping[str, MoveCosts]) -> int:
        giver, taker = costs.get(source, MoveCosts()), costs.get(target, MoveCosts())
        if not giver.block_bytes or giver.fingerprint != taker.fingerprint:
            return 0
        measured = taker.link_bytes_per_s.get(source)
        if measured is None:
            measured = median(taker.link_bytes_per_s.values() or [UNMEASURED_BYTES_PER_S])
        return int(measured * self._epoch_s)

    def _mode(self, one: Migration, mode: Mode, costs: Mapping[str, MoveCosts]) -> MoveMode | None:
        """Return the mode of a move, or None to postpone it."""
        if self._choice != "adaptive":
            return MoveMode(self._choice)
        if mode is not Mode.LATER:
            return MoveMode(mode)
        if any(busy.migration.target == one.target for busy in self._under_way.values()):
            return None
        return self._cheaper(one, costs)

    def _cheaper(self, one: Migration, costs: Mapping[str, MoveCosts]) -> MoveMode:
        """Return the mode that would finish first without other moves; tokens if nothing was measured."""
        link = self._link_bytes(one.source, one.target, costs)
        tokens = costs.get(one.target, MoveCosts()).prefill_tokens(self._epoch_s)
        by_link = one.kv_bytes / link if link else float("inf")
        by_tokens = one.tokens / tokens if tokens else float("inf")
        return MoveMode.KV if by_link < by_tokens else MoveMode.TOKENS
