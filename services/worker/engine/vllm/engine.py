"""Engine with vLLM's models, kernels and KV, and Kvasir's block ids and sampler.

Prefix cache, tiers and migration work as with the native engine; distributed attention and Pie do not
(`docs/vllm.md`)."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from msgspec.structs import replace

from services.worker.core.sampling import Sampled, SamplePoint
from services.worker.engine.contract import Row, StepRows, known_rows
from services.worker.engine.grammar_masks import GrammarMasks
from services.worker.engine.launched import Launched
from services.worker.engine.sampler import Chosen, is_steered, with_hidden
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
    overlaps: bool
    """Whether a step can be computed while the one before it is."""

    @property
    def kv(self) -> Sequence[torch.Tensor]:
        """Tensors `[NULL_BLOCKS + kv_blocks, …]` by rank and layer, contiguous, with K and V of a block."""

    def compute(self, step: StepRequests) -> None:
        """Begin a step; `sample` ends it before the next one.

        After an exception of either, its requests must be in `finished` of the next step."""

    def sample(self, draw: StepDraw) -> None:
        """Call `draw` with the logits, once; what it returns are the requests' next tokens."""

    def close(self) -> None:
        """End the other processes."""


class VllmEngine:
    """Implements `OverlappingEngine`, `ConstrainedEngine` and `CacheableEngine`."""

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
        self.requests, self.overlaps = Requests(block_tokens), runner.overlaps
        self._before: Launched | _Late | None = None
        """The step submitted last."""

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
        self._before = None
        sampled: list[Sampled | None] = []
        for part, is_told in self._parts(rows):
            found = self._launched(part).result()
            sampled += found if is_told else []
        return sampled

    def submit(self, rows: StepRows) -> "Launched | _Late":
        """See `OverlappingEngine`. Steps that run in parts do not overlap."""
        before, self._before = self._before, None
        if before is not None:
            before.choose()
        if isinstance(before, _Late) or len([*self._parts(rows)]) > 1:
            self._before = _Late(self, [*rows], before)
        else:
            self._before = self._launched(rows)
        return self._before

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

    def _launched(self, rows: Sequence[Row]) -> Launched:
        """Launch a step that fits into vLLM's buffers."""
        kept = [at for at, row in enumerate(rows) if row.point is not None]
        points = [row.point for row in rows if row.point is not None]
        waits = any(row.after >= 0 and row.point is not None and _looks_back(row.point) for row in rows)
        grammars = self._grammars
        masks = None if waits or grammars is None else grammars.begin(points)
        step = self.requests.begin(rows)
        draw = StepDraw([step.names[at] for at in kept], points, masks)
        try:
            self._runner.compute(step)
        except BaseException:
            self.requests.fail()
            raise
        known = self.requests.end()
        failed: list[Exception] = []

        def choose() -> Chosen:
            if failed:  # when the next step was submitted
                raise failed[0]
            try:
                if waits and grammars is not None:
                    draw.masks = grammars.begin(points)
                self._runner.sample(draw)
            except Exception as error:
                self.requests.fail()
                failed.append(error)
                raise
            assert draw.chosen is not None, "the runner has called it"
            return draw.chosen

        def finish(found: list[Sampled | None]) -> list[Sampled | None]:
            for at, sampled in zip(kept, found, strict=True):
                known[at].token = None if sampled is None else sampled.token
            return with_hidden(found, points, draw.hidden) if draw.embeds else found

        ticket = Launched(len(rows), kept, choose, finish)
        if not waits:
            ticket.choose()
        return ticket


class _Late:
    """Implements `StepTicket` for a step that is computed once the tokens of the step before it are known."""

    def __init__(self, engine: VllmEngine, rows: Sequence[Row], before: "Launched | _Late | None") -> None:
        self._engine, self._rows, self._before = engine, rows, before
        self._found: Sequence[Sampled | None] | None = None

    def choose(self) -> None:
        """Compute the step, unless that was done."""
        self.result()

    def result(self) -> Sequence[Sampled | None]:
        if self._found is None:
            told = () if self._before is None else self._before.result()
            self._found, self._before = self._engine.step(known_rows(self._rows, told)), None
        return self._found


def _looks_back(point: SamplePoint) -> bool:
    """Return whether a token depends on those before it, apart from the logits."""
    return bool(point.sampling.grammar) or is_steered(point)
