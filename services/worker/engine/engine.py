"""One iteration: packed rows in, tokens out. Knows blocks and positions; no sequence, no plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from services.worker.engine.attention import PagedAttention
from services.worker.engine.forward import make_forward
from services.worker.engine.layout import Span
from services.worker.engine.loading import LoadedModel
from services.worker.engine.sampler import sample
from services.worker.sampling import Sampled, SamplePoint
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

    @property
    def kv_blocks(self) -> int: ...

    @property
    def block_tokens(self) -> int: ...

    def step(self, rows: Sequence[Row]) -> list[Sampled | None]:
        """Compute all rows in one iteration, writing their KV.

        Returns one sampled token per row, None where none was asked for or its logits are not finite.
        Computing the same row again is harmless.
        """
        ...


class TorchEngine:
    """A transformers model with paged KV. Pools are allocated once, here."""

    def __init__(self, model: LoadedModel, *, kv_blocks: int, block_tokens: int) -> None:
        self._model = model
        self.kv_blocks = kv_blocks
        self.block_tokens = block_tokens
        self._attention = PagedAttention(
            model.layers,
            kv_blocks=kv_blocks,
            block_tokens=block_tokens,
            dtype=model.dtype,
            device=model.device,
        )
        self._forward = make_forward(model, self._attention)

    @property
    def vocabulary(self) -> int:
        return self._model.vocabulary

    @property
    def max_positions(self) -> int:
        return self._model.max_positions

    @torch.inference_mode()
    def step(self, rows: Sequence[Row]) -> list[Sampled | None]:
        order = sorted(range(len(rows)), key=lambda index: _packing_key(rows[index]))
        packed = [rows[index] for index in order]
        decodes = sum(len(row.tokens) == 1 for row in packed)
        self._attention.begin(
            [Span(row.first_position, len(row.tokens), row.blocks) for row in packed], decodes
        )
        logits = self._logits(packed)
        points = [row.point for row in packed if row.point is not None]
        drawn = iter(sample(logits, points) if points else ())
        tokens: list[Sampled | None] = [None] * len(rows)
        for index, row in zip(order, packed, strict=True):
            if row.point is not None:
                tokens[index] = next(drawn)
        return tokens

    def _logits(self, packed: Sequence[Row]) -> torch.Tensor:
        """`[rows that sample, vocabulary]`."""
        tokens: list[int] = []
        positions: list[int] = []
        kept: list[int] = []
        for row in packed:
            tokens += row.tokens
            positions += range(row.first_position, row.first_position + len(row.tokens))
            if row.point is not None:
                kept.append(len(tokens) - 1)
        device = self._model.device
        return self._forward(
            torch.tensor(tokens, device=device),
            torch.tensor(positions, device=device),
            torch.tensor(kept, dtype=torch.int64, device=device),
        )


def warm_up(engine: Engine) -> None:
    """Run a chunk, its continuation and a decode through block 0, so that no request pays for first calls."""
    sampling = Sampling(
        seed=0,
        max_tokens=1,
        temperature=1.0,
        top_p=0.9,
        top_k=2,
        min_p=0.01,
        min_tokens=2,
        end_token_ids=(0,),
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        top_logprobs=1,
    )
    blocks = list(range(min(2, engine.kv_blocks)))
    last = min(len(blocks) * engine.block_tokens, engine.max_positions) - 1
    half = last // 2
    for first, count in ((0, half), (half, last - half), (last, 1)):
        if count > 0:
            engine.step([Row([0] * count, first, blocks, SamplePoint(sampling, 0, 1, [0]))])


def _packing_key(row: Row) -> tuple[bool, int]:
    """Single tokens first, shortest context first, so that rows of similar length share a table."""
    return len(row.tokens) > 1, row.first_position
