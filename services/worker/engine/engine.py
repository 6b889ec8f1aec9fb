"""The native engine: runs a transformers model on packed rows and returns sampled tokens."""

from array import array
from collections.abc import Sequence
from itertools import accumulate, chain

import torch

from services.worker.core.sampling import Sampled, SamplePoint
from services.worker.engine.attention import LayerShape, PagedAttention, make_pools
from services.worker.engine.backends import Pools
from services.worker.engine.contract import Engine, Row
from services.worker.engine.embedding import with_hidden
from services.worker.engine.forward import make_forward
from services.worker.engine.grammar_masks import GrammarMasks
from services.worker.engine.loading import LoadedModel, layout_name, model_digest
from services.worker.engine.native.library import AttentionMode, choose
from services.worker.engine.sampler import sample
from services.worker.engine.spans import Span
from services.worker.engine.states import tap_of
from services.worker.engine.stream import stream_opener
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.tiers.records import Records, records_of
from services.worker.pie.assembly import BlockShape, assemble
from services.worker.pie.blocks import BlockPie
from services.worker.pie.core.forecast import DecodeCost
from services.worker.pie.core.sizes import most_fifo_layers
from services.worker.pie.settings import PieSettings
from shared.blocks import fingerprint
from shared.clock import Clock, monotonic_s
from shared.errors import InternalError
from shared.messages.sequence import Sampling


class TorchEngine:
    """Implements `AttendingEngine` for a transformers model with paged KV.

    `attention`: see `native.library.choose`. `release` frees the module's weights if a packed copy replaces
    them. With `pie`, the memory of `kv_blocks` serves more blocks, because some layers move to the host.
    """

    kv_blocks: int
    """Number of blocks at the start; with Pie the pool of `make_pool` grows and shrinks."""
    prefill_tokens_per_s = 0.0
    """Prefill throughput as profiled at the start; 0: not profiled."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        kv_blocks: int,
        block_tokens: int,
        attention: AttentionMode = "auto",
        threads: int = 1,
        release: bool = False,
        pie: PieSettings | None = None,
        grammars: GrammarMasks | None = None,
        states_every: int = 0,
        host_blocks: int = 0,
    ) -> None:
        """Allocate the pools; with Pie also host memory for `host_blocks` blocks of the prefix cache.

        `states_every`: return a hidden state with every so many tokens of an answer; 0: never.
        """
        self._model = model
        self._grammars = grammars
        self.weights = model_digest(model.module)
        self.fingerprint = fingerprint(
            model=self.weights,
            dtype=str(model.dtype),
            layout=layout_name(model.layers),
            block_tokens=block_tokens,
        )
        self.kv_blocks = kv_blocks
        self.block_tokens = block_tokens
        open_stream = stream_opener(choose(attention, device=model.device, dtype=model.dtype), model.device)
        self.pie: BlockPie | None = None
        if pie is not None and _is_swapped(pie, model.layers, can_swap_blocks=open_stream is not None):
            self.pie = assemble(
                pie,
                [
                    BlockShape(each.kv_heads, each.head_dim, each.value_dim, block_tokens, model.dtype)
                    for each in model.layers
                ],
                lambda blocks: make_pools(model.layers[0], blocks, block_tokens, model.dtype, model.device),
                open_stream,
                device_blocks=kv_blocks,
                cache_blocks=host_blocks,
            )
            self.kv_blocks = self.pie.capacity_blocks
        self._attention = PagedAttention(
            model.layers,
            kv_blocks=kv_blocks,
            block_tokens=block_tokens,
            dtype=model.dtype,
            device=model.device,
            mode=attention,
            threads=threads,
            resident=None if self.pie is None else self.pie.kv,
        )
        self._tap = tap_of(model.module.config.get_text_config(), states_every)
        self._forward = make_forward(model, self._attention, threads=threads, release=release, tap=self._tap)

    @property
    def pools(self) -> Sequence[Pools]:
        """K and V pools of each layer; see `engine.paged` for their shapes."""
        return self._attention.pools

    @property
    def device_type(self) -> str:
        """Return `cpu` or `cuda`."""
        return self._model.device.type

    @property
    def q_heads(self) -> int:
        """Number of query heads of a layer."""
        config = self._model.module.config.get_text_config()
        return int(config.num_attention_heads)

    @property
    def is_divisible(self) -> bool:
        """See `SharingEngine`."""
        return True

    @property
    def remote_block_s(self) -> float:
        """See `SharingEngine`."""
        return self._attention.remote_block_s

    @property
    def remote_total_s(self) -> float:
        """See `SharingEngine`."""
        return self._attention.remote_total_s

    @property
    def own_ids(self) -> int:
        """See `SharingEngine`."""
        resident = self._attention.resident
        return self.kv_blocks if resident is None else resident.residency.ids

    def records(self) -> Records:
        """Return the blocks as rows of bytes, for use by one thread."""
        resident = self._attention.resident
        return records_of(self.pools) if resident is None else resident.records()

    @property
    def attention(self) -> PagedAttention:
        """The paged attention; its `extend` allows blocks at other workers."""
        return self._attention

    @property
    def vocabulary(self) -> int:
        return self._model.vocabulary

    @property
    def max_positions(self) -> int:
        return self._model.max_positions

    def expect_grammar(self, grammar: str) -> None:
        """See `ConstrainedEngine`."""
        if self._grammars is not None:
            self._grammars.expect(grammar)

    def make_pool(self) -> BlockPool:
        """Return a pool of the engine's blocks; with Pie its size follows the expansion."""
        if self.pie is None:
            return BlockPool(self.kv_blocks, self.block_tokens)
        return self.pie.make_pool(self.block_tokens)

    @torch.inference_mode()
    def step(self, rows: Sequence[Row]) -> list[Sampled | None]:
        if self.pie is None or (self.pie.kv.residency.is_plain and not self.pie.watches_steps):
            return self._step_in_order(rows)
        room_blocks = self.pie.kv.residency.room_blocks
        if room_blocks is not None and _written_blocks(rows, self.block_tokens) > room_blocks:
            return self._step_in_parts(rows, room_blocks)
        self.pie.step_begins()
        sampled = self._step_in_order(rows)
        is_decoding = all(len(row.tokens) == 1 for row in rows)
        self.pie.step_ends(sum(each is not None for each in sampled), is_decoding=is_decoding)
        return sampled

    def _step_in_parts(self, rows: Sequence[Row], room_blocks: int) -> list[Sampled | None]:
        """Run halves of the rows, or of a row's tokens, until the written blocks fit on the device."""
        if len(rows) > 1:
            middle = len(rows) // 2
            return [*self.step(rows[:middle]), *self.step(rows[middle:])]
        row, most_tokens = rows[0], (room_blocks - 1) * self.block_tokens
        if most_tokens < 1:
            raise InternalError(f"a step writes to more blocks than the device's {room_blocks}")
        first = Row(row.tokens[:most_tokens], row.first_position, row.blocks, None)
        rest = Row(row.tokens[most_tokens:], row.first_position + most_tokens, row.blocks, row.point)
        self.step([first])
        return self.step([rest])

    def _step_in_order(self, rows: Sequence[Row]) -> list[Sampled | None]:
        if self._attention.library is not None:
            return self._step(rows)
        order = sorted(range(len(rows)), key=lambda index: _packing_key(rows[index]))
        tokens: list[Sampled | None] = [None] * len(rows)
        for index, sampled in zip(order, self._step([rows[index] for index in order]), strict=True):
            tokens[index] = sampled
        return tokens

    def _step(self, rows: Sequence[Row]) -> list[Sampled | None]:
        try:
            return self._computed(rows)
        except BaseException:
            self._attention.abandon()
            raise

    def _computed(self, rows: Sequence[Row]) -> list[Sampled | None]:
        """Compute rows in packed order; see `PagedAttention.begin`."""
        decodes = sum(len(row.tokens) == 1 for row in rows)
        self._attention.begin(
            [Span(row.first_position, len(row.tokens), row.blocks) for row in rows], decodes
        )
        points = [row.point for row in rows if row.point is not None]
        if self._tap is not None:
            self._tap.begin(rows)
        masks = None if self._grammars is None else self._grammars.begin(points)
        logits = self._forward(*pack(rows, decodes, len(points)))
        is_submitted = self.device_type != "cpu"
        if not is_submitted:
            self._attention.end()
        drawn = sample(logits, points, self._attention.library, masks) if points else []
        if is_submitted:  # Submit the sampling to a GPU before waiting for the step.
            self._attention.end()
        if any(point.sampling.embeds for point in points):
            drawn = with_hidden(drawn, points, logits.hidden)
        if len(drawn) != len(rows):
            following = iter(drawn)
            drawn = [None if row.point is None else next(following) for row in rows]
        if self._tap is not None:
            self._tap.attach(drawn)
        return drawn


def _is_swapped(pie: PieSettings, layers: Sequence[LayerShape], *, can_swap_blocks: bool) -> bool:
    """Return whether to use Pie; with `auto` only if all layers have one shape and blocks can be swapped."""
    if pie.enabled != "auto":
        return pie.enabled
    sizes = {(layer.kv_heads, layer.head_dim, layer.value_dim) for layer in layers}
    is_possible = len(sizes) == 1 and most_fifo_layers(len(layers)) > 0
    return can_swap_blocks and is_possible


def _written_blocks(rows: Sequence[Row], block_tokens: int) -> int:
    """Return the number of blocks that the rows write to; no two rows share one."""
    return sum(
        -(-(row.first_position + len(row.tokens)) // block_tokens) - row.first_position // block_tokens
        for row in rows
    )


def pack(rows: Sequence[Row], decodes: int, sampled: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens and positions `[packed rows]` and the sampled indices `[sampled]`; int64, on the CPU.

    `decodes`: number of rows with one token. `sampled`: number of rows with a point.
    """
    tokens = array("q", chain.from_iterable([row.tokens for row in rows]))
    if decodes == len(rows):
        positions = array("q", [row.first_position for row in rows])
    else:
        spans = [range(row.first_position, row.first_position + len(row.tokens)) for row in rows]
        positions = array("q", chain.from_iterable(spans))
    if sampled == len(tokens):
        return _int64(tokens), _int64(positions), torch.arange(sampled)
    ends = accumulate(len(row.tokens) for row in rows)
    kept = array("q", [end - 1 for end, row in zip(ends, rows, strict=True) if row.point is not None])
    return _int64(tokens), _int64(positions), _int64(kept)


def _int64(packed: "array[int]") -> torch.Tensor:
    return torch.frombuffer(packed, dtype=torch.int64) if packed else torch.empty(0, dtype=torch.int64)


def warm_up(engine: Engine) -> None:
    """Run two chunks and a decode through the first blocks, so that no request waits for first calls."""
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
    """Sort decodes first, by context length, so that rows of similar length share a padded table."""
    return len(row.tokens) > 1, row.first_position


CHUNK_TOKENS = 128
"""Number of tokens of the profiled prefill chunk."""
LEAST_TOKENS = 16
"""Smallest chunk worth profiling, in tokens."""
_ROUNDS = 3
"""Number of timed steps of one size. The first prefill counts only if it is the only one."""
_DECODE_ROWS = 8
_MOST_ROUNDS, _SHORT_S = 30, 0.1
"""Decodes repeat until they take 0.1 s, at most 30 times: a busy machine interrupts some."""
_LONG_S = 1.0
"""Total seconds after which prefill profiling stops."""


def decode_cost(engine: Engine, blocks: int, clock: Clock = monotonic_s) -> DecodeCost | None:
    """Return the cost of a decode step from the fastest steps of one and of several rows.

    Overwrites the first blocks. None if there are fewer than two.
    """
    many = min(_DECODE_ROWS, blocks)
    if many < 2:
        return None
    point = SamplePoint(Sampling(seed=0, max_tokens=1, temperature=0.0), 0, 0)
    taken: list[tuple[int, float]] = []
    for rows in (1, many):
        took_s: list[float] = []
        while len(took_s) < _ROUNDS or (sum(took_s) < _SHORT_S and len(took_s) < _MOST_ROUNDS):
            began_s = clock()
            engine.step([Row([0], 0, [block], point) for block in range(rows)])
            took_s.append(clock() - began_s)
        taken.append((rows, min(took_s)))
    return DecodeCost.of(*taken)


def prefill_tokens_per_s(engine: Engine, blocks: int, clock: Clock = monotonic_s) -> float:
    """Return the throughput of the fastest prefill chunk; 0 if fewer than `LEAST_TOKENS` tokens fit.

    Overwrites the first blocks.
    """
    tokens = min(CHUNK_TOKENS, blocks * engine.block_tokens, engine.max_positions)
    if tokens < LEAST_TOKENS:
        return 0.0
    held = list(range(-(-tokens // engine.block_tokens)))
    point = SamplePoint(Sampling(seed=0, max_tokens=1, temperature=0.0), 0, 0)
    took_s = []
    for _ in range(_ROUNDS):
        began_s = clock()
        engine.step([Row([0] * tokens, 0, held, point)])
        took_s.append(clock() - began_s)
        if sum(took_s) >= _LONG_S:
            break
    fastest_s = min(took_s[1:] or took_s)
    return tokens / fastest_s if fastest_s > 0 else 0.0
