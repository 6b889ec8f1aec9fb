"""What the worker's loop needs of an engine: rows in, tokens out. Knows no tensor and no model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from services.worker.core.sampling import Sampled, SamplePoint
from services.worker.engine.partition import Homes, Part
from services.worker.kv.core.block_pool import BlockPool

if TYPE_CHECKING:
    from services.worker.engine.attention import PagedAttention
    from services.worker.kv.tiers.records import LayerPools
    from services.worker.pie.blocks import BlockPie


class Row(msgspec.Struct, frozen=True, gc=False):
    """Consecutive tokens of one sequence to compute."""

    tokens: Sequence[int]
    first_position: int
    blocks: Sequence[int]
    """The sequence's blocks from its beginning; they have room for every token of the row."""
    point: SamplePoint | None
    """What to sample from the last token's logits, or None."""


class Engine(Protocol):
    """What every engine is. Called from one thread."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def max_positions(self) -> int: ...

    @property
    def kv_blocks(self) -> int: ...

    @property
    def block_tokens(self) -> int: ...

    @property
    def weights(self) -> str:
        """Digest of the model, its configuration and weights, in hex."""
        ...

    @property
    def prefill_tokens_per_s(self) -> float:
        """As profiled at the start; 0: it was not."""
        ...

    def step(self, rows: Sequence[Row]) -> list[Sampled | None]:
        """Compute all rows in one iteration, writing their KV.

        Returns one sampled token per row, None where none was asked for or its logits are not finite.
        Computing the same row again is harmless.
        """
        ...


@runtime_checkable
class ConstrainedEngine(Engine, Protocol):
    """An engine whose answers can keep to grammars."""

    def expect_grammar(self, grammar: str) -> None:
        """A sequence that keeps to it comes soon. Any thread may call this."""
        ...


@runtime_checkable
class SharingEngine(Engine, Protocol):
    """An engine that computes for rows whose blocks other workers hold in part, and on its own for others."""

    @property
    def pools(self) -> "LayerPools": ...

    @property
    def device_type(self) -> str:
        """`cpu` or `cuda`."""
        ...

    @property
    def own_ids(self) -> int:
        """Blocks of this engine have lower ids."""
        ...

    @property
    def is_divisible(self) -> bool:
        """Whether other workers may hold some of the keys."""
        ...

    @property
    def remote_block_s(self) -> float:
        """A decode step takes so much longer for each block in use that lies elsewhere. Smoothed; 0 before
        the first."""
        ...

    @property
    def remote_total_s(self) -> float:
        """That steps have waited for creditors since the start."""
        ...

    def make_pool(self) -> BlockPool: ...


@runtime_checkable
class AttendingEngine(SharingEngine, Protocol):
    """An engine with attention of its own over paged pools: what can attend to parts of keys."""

    @property
    def pie(self) -> "BlockPie | None": ...

    @property
    def attention(self) -> "PagedAttention": ...

    @property
    def q_heads(self) -> int: ...


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """What one holder's part of a step sees."""

    sums: npt.NDArray[np.uint32]
    """`[spans]`: of the tokens that the last row of each sees there, in order."""
    is_copied: bool
    """The blocks came here to be read."""


class RemoteTokens(Protocol):
    """The creditors' share of a step, where a block holds the tokens that it was computed for."""

    def attend(self, parts: Sequence[Part], tokens: npt.NDArray[np.int32]) -> list[SeenTokens]:
        """The step's `tokens` `[rows]` are written where a part keeps them, and each part is looked at.
        Raises CreditorLost."""
        ...


@runtime_checkable
class TokenEngine(SharingEngine, Protocol):
    """An engine whose blocks hold tokens in place of keys and values, `[blocks, block_tokens]`, int32."""

    @property
    def tokens(self) -> npt.NDArray[np.int32]: ...

    def extend(self, homes: Homes, remote: RemoteTokens) -> None:
        """From now on blocks may be elsewhere."""
        ...

    def serve(self, seen_tokens: int, *, is_busy: bool) -> float:
        """A debtor's step has seen so many tokens here: the seconds that it takes, of the next step where
        this engine `is_busy`. Any thread may call this."""
        ...
