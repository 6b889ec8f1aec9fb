"""The native engine: runs a transformers model on packed rows and returns sampled tokens."""

from array import array
from collections.abc import Sequence

import torch

from services.worker.core.decodes import DecodeBatch, Int64s
from services.worker.core.sampling import Sampled, SamplePoint
from services.worker.core.settings import PieSettings
from services.worker.engine.attention import PagedAttention, make_pools
from services.worker.engine.contract import Engine, Row, StepRows, most_sequences
from services.worker.engine.forward import make_forward
from services.worker.engine.grammar_masks import GrammarMasks
from services.worker.engine.launched import Launched
from services.worker.engine.loading import LoadedModel, layout_name, model_digest
from services.worker.engine.native.library import AttentionMode, choose
from services.worker.engine.paged import to_device
from services.worker.engine.sampler import (
    Chosen,
    Logits,
    are_likeliest,
    choose_likeliest,
    choose_tokens,
    is_steered,
    with_hidden,
)
from services.worker.engine.spans import Span
from services.worker.engine.states import tap_of
from services.worker.engine.stream import stream_opener
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.tiers.records import Records, records_of
from services.worker.pie.blocks import BlockPie, assemble
from services.worker.pie.core.meter import DecodeCost
from services.worker.pie.core.sizes import most_in_blocks
from shared.blocks import fingerprint
from shared.clock import Clock, monotonic_s
from shared.errors import ConfigError, InternalError
from shared.messages.sequence import Sampling

_NONE = array("q", [0])  # torch takes no empty buffer


class TorchEngine:
    """Implements `AttendingEngine` for a transformers model with paged KV.

    `attention`: see `native.library.choose`. `release` frees the module's weights if a packed copy replaces
    them. With `pie`, the memory of `kv_blocks` serves more blocks, because some layers move to the host."""

    prefill_tokens_per_s = 0.0
    carries = (0, 0)
    is_divisible = True

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
        pie_bytes: int = 1 << 30,
        cache_blocks: int = 0,
    ) -> None:
        """Allocate the pools; with Pie also up to `pie_bytes` of host memory, and host memory for
        `cache_blocks` blocks of the prefix cache.

        `states_every`: return a hidden state with every so many tokens of an answer; 0: never."""
        config = model.module.config.get_text_config()
        self.vocabulary, self.max_positions = model.vocabulary, model.max_positions
        self.device_type: str = model.device.type
        self.q_heads = int(config.num_attention_heads)
        self._grammars = grammars
        self.weights = model.digest or model_digest(model.module)
        dtype = " ".join(map(str, dict.fromkeys((model.dtype, model.kv_dtype))))
        self.fingerprint = fingerprint(
            model=self.weights, dtype=dtype, layout=layout_name(model.layers), block_tokens=block_tokens
        )
        self.kv_blocks = kv_blocks
        """Number of blocks at the start; with Pie the pool of `make_pool` grows and shrinks."""
        self.block_tokens = block_tokens
        library = choose(attention, device=model.device, dtype=model.dtype)
        if model.kv_dtype is not model.dtype and library is None:
            text = f"KV in {model.kv_dtype} beside {model.dtype} needs native attention: leave kv_dtype out"
            raise ConfigError(text, param="kv_dtype")
        open_stream = stream_opener(library, model.device)
        self.pie: BlockPie | None = None
        shapes = [(layer.kv_heads, layer.head_dim, layer.value_dim) for layer in model.layers]
        layer_bytes = model.block_bytes(block_tokens) // len(shapes)
        host_blocks = 0 if open_stream is None else pie_bytes // layer_bytes
        if pie is not None and _is_swapped(pie, shapes, kv_blocks, host_blocks):
            self.pie = assemble(
                pie,
                shapes,
                lambda count: make_pools(model.layers[0], count, block_tokens, model.kv_dtype, model.device),
                open_stream,
                device_blocks=kv_blocks,
                host_bytes=pie_bytes,
                cache_blocks=cache_blocks,
            )
            self.kv_blocks = self.pie.capacity_blocks
        self._resident = None if self.pie is None else self.pie.kv
        self.own_ids = kv_blocks if self._resident is None else self._resident.residency.ids
        self.attention = PagedAttention(
            model.layers,
            kv_blocks=kv_blocks,
            block_tokens=block_tokens,
            dtype=model.kv_dtype,
            device=model.device,
            mode=attention,
            threads=threads,
            resident=self._resident,
        )
        self.remote = self.attention.meter
        self.pools = self.attention.pools
        """K and V pools of each layer; see `engine.paged` for their shapes."""
        self._tap = tap_of(config, states_every)
        self._device = model.device
        self._before: Launched | None = None
        """The step submitted last."""
        self.overlaps = self.attention.triton is not None and self.pie is None and self._tap is None
        """See `OverlappingEngine`. Steps that move blocks or tap states are finished one by one."""
        self._forward = make_forward(model, self.attention, threads=threads, release=release, tap=self._tap)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor) -> Logits:
        """Return the logits of the rows `kept` of a step that `attention.begin` has begun."""
        return self._forward(tokens, positions, kept)

    def records(self) -> Records:
        """Return the blocks as rows of bytes, for use by one thread."""
        return records_of(self.pools) if self._resident is None else self._resident.records()

    def expect_grammar(self, grammar: str) -> None:
        if self._grammars is not None:
            self._grammars.expect(grammar)

    def make_pool(self) -> BlockPool:
        """Return a pool of the engine's blocks; with Pie its size follows the expansion."""
        if self.pie is None:
            return BlockPool(self.kv_blocks, self.block_tokens)
        return self.pie.make_pool(self.block_tokens)

    @torch.inference_mode()
    def step(self, rows: Sequence[Row]) -> Sequence[Sampled | None]:
        pie, self._before = self.pie, None
        if pie is None or (pie.kv.residency.is_plain and not pie.watches_steps):
            return self._computed(rows)
        room_blocks = pie.kv.residency.room_blocks
        if room_blocks is not None and _written_blocks(rows, self.block_tokens) > room_blocks:
            return self._step_in_parts(rows, room_blocks)
        pie.step_begins()
        sampled = self._computed(rows)
        is_decoding = all(len(row.tokens) == 1 for row in rows)
        pie.step_ends(sum(each is not None for each in sampled), is_decoding=is_decoding)
        return sampled

    @torch.inference_mode()
    def submit(self, rows: StepRows) -> Launched:
        """See `OverlappingEngine`."""
        before, self._before = self._before, None
        if before is not None:
            before.choose()
        self._before = ticket = self._launched(rows.decodes, rows.others, rows.after, before)
        return ticket

    def _step_in_parts(self, rows: Sequence[Row], room_blocks: int) -> Sequence[Sampled | None]:
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

    def _computed(self, rows: Sequence[Row]) -> Sequence[Sampled | None]:
        """Return the rows' tokens. Plain torch and Triton compute decodes first, by context length.

        Rows of similar length then share a padded table."""
        batch, others = None, rows
        if isinstance(rows, StepRows) and self._tap is None:
            batch, others = rows.decodes, rows.others
        if self.attention.library is not None or (batch is not None and all(map(_is_chunk, others))):
            return self._finished(batch, others)
        order = sorted(range(len(rows)), key=lambda at: (_is_chunk(rows[at]), rows[at].first_position))
        tokens: list[Sampled | None] = [None] * len(rows)
        found = self._finished(None, [rows[at] for at in order])
        for at, sampled in zip(order, found, strict=True):
            tokens[at] = sampled
        return tokens

    def _finished(self, batch: DecodeBatch | None, rows: Sequence[Row]) -> Sequence[Sampled | None]:
        found = self._launched(batch, rows).result()
        if self._tap is not None:
            found = self._tap.attach(list(found))
        return found

    def _launched(
        self,
        batch: DecodeBatch | None,
        rows: Sequence[Row],
        after: Int64s | None = None,
        before: Launched | None = None,
    ) -> Launched:
        """Launch a batch, if there is one, and the rows after it. `after`: of the batch; see `Row.after`."""
        try:
            return self._launch(batch, rows, after, before)
        except BaseException:
            self.attention.abandon()
            raise

    def _launch(
        self, batch: DecodeBatch | None, rows: Sequence[Row], after: Int64s | None, before: Launched | None
    ) -> Launched:
        decodes = count = 0 if batch is None else len(batch)
        tokens, positions, kept = array("q"), array("q"), array("q", range(count if rows else 0))
        if batch is not None and rows:
            tokens.frombytes(batch.tokens.tobytes())
            positions.frombytes(batch.first.tobytes())
        sampling, spans = [*range(count)], list[Span]()
        unknown = [] if after is None else [(row, at) for row, at in enumerate(after.tolist()) if at >= 0]
        is_embedding = any(row.point is not None and row.point.sampling.embeds for row in rows)
        are_likely = batch is not None and not is_embedding and are_likeliest(batch)
        points = [] if batch is None or are_likely else batch.group.points(batch)
        for at, row in enumerate(rows, count):
            length, first = len(row.tokens), row.first_position
            spans.append(Span(first, length, row.blocks))
            if row.after >= 0:
                unknown.append((len(tokens), row.after))
            tokens.extend(row.tokens)
            if length == 1:
                decodes += 1
                positions.append(first)
            else:
                positions.extend(range(first, first + length))
            if row.point is not None:
                points.append(row.point)
                sampling.append(at)
                kept.append(len(tokens) - 1)
        self.attention.begin(spans, decodes, batch)
        if self._tap is not None:
            self._tap.begin(rows)
        is_constrained = any(point.sampling.grammar for point in points)
        waits = bool(unknown) and (is_constrained or any(map(is_steered, points)))
        masks = None
        if is_constrained and self._grammars is not None and not waits:
            masks = self._grammars.begin(points)
        if batch is not None and not rows:
            packed = [torch.from_numpy(batch.tokens), torch.from_numpy(batch.first), torch.arange(count)]
        else:
            arrays = tokens, positions, kept
            packed = [torch.frombuffer(each or _NONE, dtype=torch.int64)[: len(each)] for each in arrays]
        if before is not None and unknown:
            places, told = torch.tensor(unknown).T
            packed[0] = to_device(packed[0].clone(), self._device)
            packed[0][to_device(places, self._device)] = before.tokens(told.numpy())
        logits, library = self._forward(*packed), self.attention.library
        if self.device_type == "cpu":
            self.attention.end()
        hidden = logits.hidden
        if is_embedding and hidden is not None:
            hidden = hidden.clone()  # The next step overwrites it.

        def choose() -> Chosen:
            late = self._grammars.begin(points) if waits and self._grammars is not None else masks
            if are_likely:
                return choose_likeliest(logits, count, points, library, late)
            return choose_tokens(logits, points, library, late)

        finish = (lambda drawn: with_hidden(drawn, points, hidden)) if is_embedding else None
        ticket = Launched(count + len(rows), sampling, choose, finish, plain_rows=count)
        if not waits:
            ticket.choose()
        if self.device_type != "cpu":  # Submit the sampling to a GPU before waiting for the step.
            self.attention.end()
        return ticket


def _is_chunk(row: Row) -> bool:
    return len(row.tokens) > 1


def _is_swapped(pie: PieSettings, shapes: Sequence[object], kv_blocks: int, host_blocks: int) -> bool:
    """Return whether to use Pie; with `auto` only if all layers have one shape and a level fits into
    `host_blocks` blocks of one layer. At level 0 Pie takes as much host memory as there is KV, which a GPU
    page-locks, and steps do not overlap."""
    if pie.enabled != "auto":
        return pie.enabled
    can_rise = pie.fifo_layers > 0 or most_in_blocks(len(shapes), kv_blocks, host_blocks) > 0
    return host_blocks > 0 and len({*shapes}) == 1 and can_rise


def _written_blocks(rows: Sequence[Row], block_tokens: int) -> int:
    """Return the number of blocks that the rows write to; no two rows share one."""
    return sum(
        -(-(row.first_position + len(row.tokens)) // block_tokens) - row.first_position // block_tokens
        for row in rows
    )


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


CHUNK_TOKENS = 128
"""Number of tokens of the profiled prefill chunk."""
LEAST_TOKENS = 16
"""Smallest chunk worth profiling, in tokens."""
_ROUNDS = 3
"""Number of timed steps of one size. The first prefill counts only if it is the only one."""
_DECODE_ROWS = 8
_MOST_ROUNDS, _SHORT_S = 30, 0.1
"""Decodes repeat until they take 0.1 s, at most 30 times: a busy machine interrupts some."""
_LEAST_STEP_TOKENS, _TIMED_TOKENS, _MOST_STEP_TOKENS, _STEP_S = 512, 4096, 8192, 0.25
_LONG_S = 1.0
"""Total seconds after which prefill profiling stops."""
_GREEDY = SamplePoint(Sampling(seed=0, max_tokens=1, temperature=0.0), 0, 0)


def decode_cost(engine: Engine, blocks: int, clock: Clock = monotonic_s) -> DecodeCost | None:
    """Return the cost of a decode step from the fastest steps of one and of several rows.

    Overwrites the first blocks. None if there are fewer than two."""
    many = min(_DECODE_ROWS, blocks)
    if many < 2:
        return None
    taken: list[tuple[int, float]] = []
    for rows in (1, many):
        took_s: list[float] = []
        while len(took_s) < _ROUNDS or (sum(took_s) < _SHORT_S and len(took_s) < _MOST_ROUNDS):
            began_s = clock()
            engine.step([Row([0], 0, [block], _GREEDY) for block in range(rows)])
            took_s.append(clock() - began_s)
        taken.append((rows, min(took_s)))
    return DecodeCost.of(*taken)


def prefill_tokens_per_s(engine: Engine, blocks: int, clock: Clock = monotonic_s) -> float:
    """Return the throughput of the fastest prefill chunk; 0 if fewer than `LEAST_TOKENS` tokens fit.

    Overwrites the first blocks."""
    tokens = min(CHUNK_TOKENS, blocks * engine.block_tokens, engine.max_positions)
    if tokens < LEAST_TOKENS:
        return 0.0
    fastest_s = _prefill_s(engine, tokens, clock)
    return tokens / fastest_s if fastest_s > 0 else 0.0


def carried(engine: Engine, blocks: int, clock: Clock = monotonic_s) -> tuple[int, int]:
    """Return the sequences of a batch and the tokens of a step that a GPU carries.

    Sequences by the KV, at 1,024 tokens each; tokens by two timed prompts, for steps of 0.25 s. Overwrites
    the first blocks."""
    kv_tokens = blocks * engine.block_tokens
    sequences, tokens = most_sequences(kv_tokens), _LEAST_STEP_TOKENS
    many = min(_TIMED_TOKENS, kv_tokens, engine.max_positions)
    if many > tokens:
        few_s, many_s = (_prefill_s(engine, each, clock) for each in (tokens, many))
        cost = DecodeCost.of((tokens, few_s), (many, many_s))
        while tokens < _MOST_STEP_TOKENS and cost.fixed_s + 2 * tokens * cost.row_s <= _STEP_S:
            tokens *= 2
    return sequences, tokens


def _prefill_s(engine: Engine, tokens: int, clock: Clock) -> float:
    rows = [Row([0] * tokens, 0, list(range(-(-tokens // engine.block_tokens))), _GREEDY)]
    took_s: list[float] = []
    while len(took_s) < _ROUNDS and sum(took_s) < _LONG_S:
        began_s = clock()
        engine.step(rows)
        took_s.append(clock() - began_s)
    return min(took_s[1:] or took_s)
