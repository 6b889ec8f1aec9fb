"""Protocols of the engines that the worker's loop can run: rows in, sampled tokens out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from services.worker.core.decodes import DecodeBatch, Int64s
from services.worker.core.sampling import Sampled, SamplePoint
from services.worker.engine.partition import Homes, Part
from services.worker.kv.core.block_pool import BlockPool
from shared.average import averaged

if TYPE_CHECKING:
    from services.worker.engine.attention import PagedAttention
    from services.worker.kv.tiers.records import LayerPools
    from services.worker.pie.blocks import BlockPie

_WEIGHT = 0.1
"""Weight of the newest step in averages."""


class Row(msgspec.Struct, frozen=True, gc=False):
    """Consecutive tokens of one sequence to compute in a step."""

    tokens: Sequence[int]
    first_position: int
    blocks: Sequence[int]
    """The sequence's block table from its first token; it covers every token of the row."""
    point: SamplePoint | None
    """How to sample from the last token's logits; None: sample nothing."""
    after: int = -1
    """The row of the step before whose token is this row's only one, as that step is in flight; negative:
    `tokens` are known."""
    adapter: str = ""
    """LoRA adapter to compute with; empty: none."""


class StepRows(Sequence[Row]):
    """The rows of a step: decodes as arrays, then others. As a sequence it makes a `Row` of each."""

    def __init__(
        self, decodes: DecodeBatch | None, others: Sequence[Row], after: Int64s | None = None
    ) -> None:
        self.decodes, self.others = decodes, others
        self.after = after
        """`Row.after` of each of the decodes; None: all of their tokens are known."""
        self._rows: list[Row] | None = None

    def __len__(self) -> int:
        return len(self.others) + (0 if self.decodes is None else len(self.decodes))

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        return self._all()[at]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._all())

    def _all(self) -> list[Row]:
        if self._rows is None:
            self._rows = [*rows_of(self.decodes, self.after), *self.others]
        return self._rows

    def known(self, told: Sequence[Sampled | None]) -> "StepRows":
        """Return the rows with all tokens, given those of the step before."""
        batch, after = self.decodes, self.after
        others = known_rows(self.others, told)
        if batch is not None and after is not None:
            rows = np.flatnonzero(after >= 0)
            tokens = batch.tokens.copy()
            tokens[rows] = [_token(told[at]) for at in after[rows].tolist()]
            batch = DecodeBatch(batch.group, batch.first, tokens)
        return StepRows(batch, others)


def _token(sampled: Sampled | None) -> int:
    """Any token where there is none: the row is computed in vain."""
    return 0 if sampled is None else max(0, sampled.token)


def known_rows(rows: Sequence[Row], told: Sequence[Sampled | None]) -> list[Row]:
    """Return rows with all tokens, given those of the step before."""
    return [
        row if row.after < 0 else msgspec.structs.replace(row, tokens=[_token(told[row.after])], after=-1)
        for row in rows
    ]


def rows_of(decodes: DecodeBatch | None, after: Int64s | None = None) -> list[Row]:
    """Return the rows of a batch one by one. `after`: see `StepRows`."""
    if decodes is None:
        return []
    group, tokens, first = decodes.group, decodes.tokens.tolist(), decodes.first.tolist()
    places = [-1] * len(decodes) if after is None else after.tolist()
    each = zip(group.sequences, tokens, first, group.points(decodes), places, strict=True)
    return [
        Row([token], first, one.blocks, point, place, one.adapter) for one, token, first, point, place in each
    ]


class StepTicket(Protocol):
    """A step in flight."""

    def result(self) -> Sequence[Sampled | None]:
        """Wait for the step, and return what `Engine.step` returns. Raises its errors. Call this once, in the
        order of the steps, and after the tokens of the step before were appended to their sequences."""


def most_sequences(kv_tokens: int) -> int:
    """Return how many sequences of 1,024 tokens a GPU's KV holds, from 64 to 256."""
    return min(256, max(64, kv_tokens // 1024))


class Engine(Protocol):
    """An engine; called from one thread."""

    vocabulary: int
    max_positions: int
    kv_blocks: int
    block_tokens: int
    weights: str
    """Hex digest of the model's configuration and weights."""
    prefill_tokens_per_s: float
    """Prefill throughput as profiled at the start; 0: not profiled."""
    carries: tuple[int, int]
    """Sequences of a batch and tokens of a step that a GPU carries; zeros: the scheduler's defaults."""

    def step(self, rows: Sequence[Row]) -> Sequence[Sampled | None]:
        """Compute all rows, write their KV, and return one sampled token per row.

        The token is None if the row's `point` is None or its logits are not finite. Steps are idempotent."""


@runtime_checkable
class OverlappingEngine(Engine, Protocol):
    """An engine that computes while its caller prepares the next step."""

    overlaps: bool
    """Whether it does. If not, only `step` is called."""

    def submit(self, rows: StepRows) -> StepTicket:
        """Begin a step; `step` is this and `Ticket.result`. At most two are in flight, and only decodes of
        sequences in the first of them have unknown tokens in the second. The blocks of a step in flight
        belong to it."""


@runtime_checkable
class ConstrainedEngine(Engine, Protocol):
    """An engine that can constrain sampling by a grammar."""

    def expect_grammar(self, grammar: str) -> None:
        """Compile a grammar ahead of its first row. Any thread may call this."""


@dataclass(slots=True)
class RemoteMeter:
    """Seconds that an engine's steps have waited for creditors. Any thread may read it."""

    block_s: float = 0.0
    """Extra seconds of a decode step per remote block in use, smoothed; 0 before the first."""
    total_s: float = 0.0

    def on_step(self, waited_s: float, decode_blocks: int) -> None:
        """Count a step; `decode_blocks`: remote blocks of a step that only decodes, else 0."""
        self.total_s += waited_s
        if decode_blocks:
            self.block_s = averaged(self.block_s or None, waited_s / decode_blocks, _WEIGHT)


@runtime_checkable
class SharingEngine(Engine, Protocol):
    """An engine that can use blocks of other workers and compute on its own blocks for them."""

    device_type: str
    """`cpu` or `cuda`."""
    own_ids: int
    """Smallest block id that is not this engine's own."""
    is_divisible: bool
    """Whether other workers may hold some of a sequence's keys."""
    remote: RemoteMeter

    @property
    def pools(self) -> "LayerPools": ...

    def make_pool(self) -> BlockPool: ...


@runtime_checkable
class AttendingEngine(SharingEngine, Protocol):
    """An engine with its own attention over paged pools, which can attend to a part of a sequence's keys."""

    pie: "BlockPie | None"
    attention: "PagedAttention"
    q_heads: int


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """Checksums of the tokens that the rows of a step see at one holder."""

    sums: npt.NDArray[np.uint32]
    """`[spans]`: checksum of the tokens that each span's last row sees there, in order."""
    is_copied: bool
    """Whether the blocks were copied here to be read."""


class RemoteTokens(Protocol):
    """The creditors' parts of a step of a `TokenEngine`."""

    def attend(self, parts: Sequence[Part], tokens: npt.NDArray[np.int32]) -> list[SeenTokens]:
        """Write the step's `tokens` `[rows]` to their holders and return what each part sees.

        Raises CreditorLost."""


@runtime_checkable
class TokenEngine(SharingEngine, Protocol):
    """An engine whose blocks hold token ids instead of KV: `[blocks, block_tokens]`, int32."""

    tokens: npt.NDArray[np.int32]

    def extend(self, homes: Homes, remote: RemoteTokens) -> None:
        """Allow blocks at other workers from now on."""

    def serve(self, seen_tokens: int, *, is_busy: bool) -> float:
        """Return the seconds that a debtor's step over `seen_tokens` tokens takes here.

        If this engine `is_busy`, they are added to its next step. Any thread may call this."""
