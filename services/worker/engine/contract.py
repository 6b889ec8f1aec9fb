"""What the worker's loop needs of an engine: rows in, tokens out. Knows no tensor and no model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

from services.worker.core.sampling import Sampled, SamplePoint
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
class AttendingEngine(Engine, Protocol):
    """An engine with attention of its own over paged pools: what can attend to parts of keys."""

    @property
    def pie(self) -> "BlockPie | None": ...

    @property
    def pools(self) -> "LayerPools": ...

    @property
    def attention(self) -> "PagedAttention": ...

    @property
    def device_type(self) -> str:
        """`cpu` or `cuda`."""
        ...

    @property
    def own_ids(self) -> int:
        """Blocks of this engine have lower ids."""
        ...

    @property
    def q_heads(self) -> int: ...

    @property
    def is_divisible(self) -> bool: ...

    def make_pool(self) -> BlockPool: ...
