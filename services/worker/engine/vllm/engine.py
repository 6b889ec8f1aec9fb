"""Engine with vLLM's models, kernels and KV, and Kvasir's block ids and sampler.

Prefix cache, tiers and migration work as with the native engine; distributed attention and Pie do not
(`docs/vllm.md`)."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from msgspec.structs import replace

from services.worker.core.sampling import Sampled
from services.worker.engine.contract import Row
from services.worker.engine.grammar_masks import GrammarMasks
from services.worker.engine.vllm.draw import StepDraw
from services.worker.engine.vllm.requests import NULL_BLOCKS, Requests, StepRequests
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.tiers.records import Records, records_of
from shared.blocks import fingerprint


class ModelRunner(Protocol):
    """A model with its KV and kernels; called from one thread."""

    version: str
    vocabulary: int
    max_positions: int
    """Most positions of a sequence: one less than the model's, so that the last sampled token fits."""
    dtype: torch.dtype
    """Dtype of weights and KV."""
    layout: str
    """Name of a block's memory layout."""

    @property
    def kv(self) -> Sequence[torch.Tensor]:
        """Tensors `[NULL_BLOCKS + kv_blocks, …]` by rank and layer, contiguous, with K and V of a block."""

    def run(self, step: StepRequests, draw: StepDraw) -> None:
        """Run one step. `draw` is called once, and returns each request's next token.

        After an exception the requests of this step must be in `finished` of the next step."""

    def close(self) -> None:
        """End the other processes."""


class VllmEngine:
    """Implements `ConstrainedEngine` and `CacheableEngine`."""

    prefill_tokens_per_s = 0.0
    carries = (0, 0)

    def __init__(
        self,
        runner: ModelRunner,
        *,
        weights: str,
        block_tokens: int,
        max_rows: int,
        max_step_tokens: int,
        grammars: GrammarMasks | None = None,
    ) -> None:
        """`weights`: digest of the checkpoint and adapters."""
        self._runner, self._grammars = runner, grammars
        self._max_rows, self._max_step_tokens = max_rows, max_step_tokens
        self.block_tokens, self.weights = block_tokens, weights
        self.kv_blocks = len(runner.kv[0]) - NULL_BLOCKS
        self.vocabulary, self.max_positions = runner.vocabulary, runner.max_positions
        model, dtype = f"vllm {runner.version} {weights}", str(runner.dtype)
        self.fingerprint = fingerprint(
            model=model, dtype=dtype, layout=runner.layout, block_tokens=block_tokens
        )
        self.requests = Requests(block_tokens)

    @property
    def pools(self) -> Sequence[tuple[torch.Tensor, ...]]:
        """One tensor per layer with K and V, in the layout of vLLM's kernels."""
        return [(layer[NULL_BLOCKS:],) for layer in self._runner.kv]

    def records(self) -> Records:
        """Return the blocks as rows of bytes, for use by one thread."""
        return records_of(self.pools)

    def make_pool(self) -> BlockPool:
        """Return a pool of the engine's blocks."""
        return BlockPool(self.kv_blocks, self.block_tokens)

    def expect_grammar(self, grammar: str) -> None:
        if self._grammars is not None:
            self._grammars.expect(grammar)

    def close(self) -> None:
        """End the other processes. Call nothing after this."""
        self._runner.close()

    def step(self, rows: Sequence[Row]) -> list[Sampled | None]:
        """See `Engine`. A step larger than vLLM's buffers runs in parts."""
        sampled: list[Sampled | None] = []
        for part, is_told in self._parts(rows):
            found = self._step(part)
            sampled += found if is_told else []
        return sampled

    def _parts(self, rows: Sequence[Row]) -> Iterator[tuple[list[Row], bool]]:
        """Yield rows that fit into vLLM's buffers, and whether their tokens belong to the step's result."""
        part: list[Row] = []
        tokens = 0
        for whole in rows:
            row = whole
            while len(row.tokens) > self._max_step_tokens:
                head, tail = row.tokens[: self._max_step_tokens], row.tokens[self._max_step_tokens :]
                yield [replace(row, tokens=head, point=None)], False
                row = replace(row, tokens=tail, first_position=row.first_position + len(head))
            if part and (len(part) == self._max_rows or tokens + len(row.tokens) > self._max_step_tokens):
                yield part, True
                part, tokens = [], 0
            part.append(row)
            tokens += len(row.tokens)
        if part:
            yield part, True

    def _step(self, rows: Sequence[Row]) -> list[Sampled | None]:
        points = [row.point for row in rows if row.point is not None]
        masks = None if self._grammars is None else self._grammars.begin(points)
        step = self.requests.begin(rows)
        wanted = [name for name, row in zip(step.names, rows, strict=True) if row.point is not None]
        draw = StepDraw(wanted, points, masks)
        try:
            self._runner.run(step, draw)
        except BaseException:
            self.requests.fail()
            raise
        self.requests.end([draw.noted(name) for name in step.names])
        return [draw.drawn.get(name) for name in step.names]
