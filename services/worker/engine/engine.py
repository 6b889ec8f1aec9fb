"""One iteration: packed rows in, tokens out. Knows blocks and positions; no sequence, no plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from services.worker.engine.attention import PagedAttention
from services.worker.engine.layout import Span
from services.worker.engine.loading import LoadedModel, replace_attention
from services.worker.engine.sampler import SamplePoint, sample
from shared.messages.sequence import Sampling


@dataclass(frozen=True, slots=True)
class Row:
    """Consecutive tokens of one sequence to compute."""

    tokens: Sequence[int]
    first_position: int
    blocks: Sequence[int]
    """The sequence's blocks from its beginning; they have room for every token of the row."""
    point: SamplePoint | None
    """What to sample from the last token's logits, or None."""


class Engine(Protocol):
    """What the worker's loop needs of an engine. Called from one thread."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def max_positions(self) -> int: ...

    def step(self, rows: Sequence[Row]) -> list[int | None]:
        """Compute all rows in one iteration, writing their KV.

        Returns one sampled token per row, None where none was asked for or its logits are not finite.
        Computing the same row again is harmless.
        """
        ...


class TorchEngine:
    """A transformers model with paged KV. Pools are allocated once, here."""

    def __init__(self, model: LoadedModel, *, kv_blocks: int, block_tokens: int) -> None:
        self._model = model
        self._attention = PagedAttention(
            model.layers,
            kv_blocks=kv_blocks,
            block_tokens=block_tokens,
            dtype=model.dtype,
            device=model.device,
        )
        replace_attention(model.module, self._attention.name)

    @property
    def vocabulary(self) -> int:
        return self._model.vocabulary

    @property
    def max_positions(self) -> int:
        return self._model.max_positions

    @torch.inference_mode()
    def step(self, rows: Sequence[Row]) -> list[int | None]:
        order = sorted(range(len(rows)), key=lambda index: _packing_key(rows[index]))
        packed = [rows[index] for index in order]
        decodes = sum(len(row.tokens) == 1 for row in packed)
        self._attention.begin(
            [Span(row.first_position, len(row.tokens), row.blocks) for row in packed], decodes
        )
        logits = self._forward(packed)
        points = [row.point for row in packed if row.point is not None]
        drawn = iter(sample(logits, points) if points else ())
        tokens: list[int | None] = [None] * len(rows)
        for index, row in zip(order, packed, strict=True):
            if row.point is not None:
                tokens[index] = next(drawn)
        return tokens

    def _forward(self, packed: Sequence[Row]) -> torch.Tensor:
        """Logits `[rows that sample, vocabulary]`."""
        tokens: list[int] = []
        positions: list[int] = []
        kept: list[int] = []
        for row in packed:
            tokens += row.tokens
            positions += range(row.first_position, row.first_position + len(row.tokens))
            if row.point is not None:
                kept.append(len(tokens) - 1)
        device = self._model.device
        output = self._model.module(
            input_ids=torch.tensor([tokens], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
            logits_to_keep=torch.tensor(kept or [0], device=device),
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def warm_up(engine: Engine, block_tokens: int, kv_blocks: int) -> None:
    """Run a chunk, its continuation and a decode through block 0, so that no request pays for first calls."""
    sampling = Sampling(seed=0, max_tokens=1, temperature=1.0, top_p=0.9, top_k=2)
    blocks = list(range(min(2, kv_blocks)))
    last = min(len(blocks) * block_tokens, engine.max_positions) - 1
    half = last // 2
    for first, count in ((0, half), (half, last - half), (last, 1)):
        if count > 0:
            engine.step([Row([0] * count, first, blocks, SamplePoint(sampling, 0, 0))])


def _packing_key(row: Row) -> tuple[bool, int]:
    """Single tokens first, shortest context first, so that rows of similar length share a table."""
    return len(row.tokens) > 1, row.first_position
