"""Protocols of the engines that the worker's loop can run: rows in, sampled tokens out."""

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
    """Consecutive tokens of one sequence to compute in a step."""

    tokens: Sequence[int]
    first_position: int
    blocks: Sequence[int]
    """The sequence's block table from its first token; it covers every token of the row."""
    point: SamplePoint | None
    """How to sample from the last token's logits; None: sample nothing."""


class Engine(Protocol):
    """An engine; called from one thread."""

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
        """Hex digest of the model's configuration and weights."""
        ...

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prefill throughput as profiled at the start; 0: not profiled."""
        ...

    def step(self, rows: Sequence[Row]) -> list[Sampled | None]:
        """Compute all rows, write their KV, and return one sampled token per row.

        The token is None if the row's `point` is None or its logits are not finite. Steps are idempotent.
        """
        ...


@runtime_checkable
class ConstrainedEngine(Engine, Protocol):
    """An engine that can constrain sampling by a grammar."""

    def expect_grammar(self, grammar: str) -> None:
        """Compile a grammar ahead of its first row. Any thread may call this."""
        ...


@runtime_checkable
class SharingEngine(Engine, Protocol):
    """An engine that can use blocks of other workers and compute on its own blocks for them."""

    @property
    def pools(self) -> "LayerPools": ...

    @property
    def device_type(self) -> str:
        """Return `cpu` or `cuda`."""
        ...

    @property
    def own_ids(self) -> int:
        """Smallest block id that is not this engine's own."""
        ...

    @property
    def is_divisible(self) -> bool:
        """Whether other workers may hold some of a sequence's keys."""
        ...

    @property
    def remote_block_s(self) -> float:
        """Extra seconds of a decode step per remote block in use, smoothed; 0 before the first."""
        ...

    @property
    def remote_total_s(self) -> float:
        """Total seconds that steps have waited for creditors since the start."""
        ...

    def make_pool(self) -> BlockPool: ...


@runtime_checkable
class AttendingEngine(SharingEngine, Protocol):
    """An engine with its own attention over paged pools, which can attend to a part of a sequence's keys."""

    @property
    def pie(self) -> "BlockPie | None": ...

    @property
    def attention(self) -> "PagedAttention": ...

    @property
    def q_heads(self) -> int: ...


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

        Raises CreditorLost.
        """
        ...


@runtime_checkable
class TokenEngine(SharingEngine, Protocol):
    """An engine whose blocks hold token ids instead of KV: `[blocks, block_tokens]`, int32."""

    @property
    def tokens(self) -> npt.NDArray[np.int32]: ...

    def extend(self, homes: Homes, remote: RemoteTokens) -> None:
        """Allow blocks at other workers from now on."""
        ...

    def serve(self, seen_tokens: int, *, is_busy: bool) -> float:
        """Return the seconds that a debtor's step over `seen_tokens` tokens takes here.

        If this engine `is_busy`, they are added to its next step. Any thread may call this.
        """
        ...
