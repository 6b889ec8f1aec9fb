# Kernels use Triton's types, which mypy cannot check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton kernels over paged KV, launched by `services.worker.engine.gpu.attention`.

The contract is that of `services/worker/engine/native/attention.h`. One kernel serves decode and chunked
prefill. A program computes a tile of (token, query head) pairs that share a KV head. Each key and value is
read once per group, and products have the 16 rows that tensor cores need. Softmax is online over tiles of
keys (FlashAttention-2). For small batches the keys are split between programs and a second kernel merges
(flash-decoding; Infinite-LLM §4). Reductions have a fixed order, so results are bit-identical."""

import triton
import triton.language as tl

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _capped(scores, softcap):
    """Return softcap · tanh(scores / softcap), without overflow."""
    small = tl.exp2(tl.abs(scores) * (-2.0 * _LOG2_E / softcap))
    size = softcap * (1.0 - small) / (1.0 + small)
    return tl.where(scores < 0, -size, size)


# Alignment of index arrays and number of splits change from step to step. Specialising on them would make a
# request wait for the compiler (`compile_ahead`).
_SPANS = ["first_row", "first_position", "table_start", "table_position", "key_end", "blocks"]
_TILES = ["tile_span", "tile_row"]


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=[*_SPANS, *_TILES])
def attend_kernel(
    query,  # [rows, Q_HEADS, HEAD_DIM], `query_stride` elements between rows
    key_pool,  # [num_blocks, KV_HEADS, HEAD_DIM, BLOCK_TOKENS]
    value_pool,  # [num_blocks, KV_HEADS, BLOCK_TOKENS, VALUE_DIM]
    output,  # [rows, Q_HEADS, splits, VALUE_DIM]
    lse,  # fp32 [rows, Q_HEADS, splits]
    tile_span,  # int32 [tiles]: span index
    tile_row,  # int32 [tiles]: packed row of the tile's first token
    first_row,  # int32 [spans + 1], and the rest as in attention.h
    first_position,
    table_start,
    table_position,
    key_end,
    blocks,  # with TILE_KEYS more entries, because tiles are read as a whole
    query_stride,
    scaling,
    softcap,
    splits,
    HAS_SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,  # tokens; 0: no window
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_LANES: tl.constexpr,  # HEAD_DIM rounded up to a power of two of at least 16
    VALUE_LANES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,  # at most TILE_ROWS // (Q_HEADS // KV_HEADS)
    TILE_KEYS: tl.constexpr,
    WIDEN: tl.constexpr,  # multiply in fp32: Triton's interpreter cannot multiply bf16
):
    """Programs (tile, KV head, split): attention of a tile of rows over one part of their keys."""
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    span = tl.load(tile_span + tile)
    row_0 = tl.load(tile_row + tile)
    end_row = tl.load(first_row + span + 1)
    position_0 = tl.load(first_position + span) + row_0 - tl.load(first_row + span)
    base = tl.load(table_position + span)
    end = tl.load(key_end + span)
    table = blocks + tl.load(table_start + span)
    lane = tl.arange(0, TILE_ROWS)
    token = lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    row = (row_0 + token).to(tl.int64)
    real = (token < TILE_TOKENS) & (row < end_row)
    position = position_0 + token
    high = tl.minimum(position + 1, end)
    tokens = tl.minimum(end_row - row_0, TILE_TOKENS)
    tile_high = tl.minimum(position_0 + tokens, end)
    if WINDOW > 0:
        low = tl.maximum(position - WINDOW + 1, base)
        tile_low = tl.maximum(position_0 - WINDOW + 1, base)
    else:
        low = tl.zeros([TILE_ROWS], tl.int32) + base
        tile_low = base
    dim = tl.arange(0, HEAD_LANES)
    value_dim = tl.arange(0, VALUE_LANES)
    q = tl.load(
        query + row[:, None] * query_stride + head[:, None] * HEAD_DIM + dim[None, :],
        mask=real[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    q = q.to(key_pool.dtype.element_ty)
    if WIDEN:
        q = q.to(tl.float32)
    first_tile = (tile_low - base) // TILE_KEYS
    end_tile = tl.maximum(tl.cdiv(tile_high - base, TILE_KEYS), first_tile)
    share = tl.cdiv(end_tile - first_tile, splits)
    begin = first_tile + split * share
    finish = tl.minimum(begin + share, end_tile)
    highest = tl.full([TILE_ROWS], -float("inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    sums = tl.zeros([TILE_ROWS, VALUE_LANES], tl.float32)
    key_lane = tl.arange(0, TILE_KEYS)
    for index in range(begin, finish):
        offset = index * TILE_KEYS + key_lane
        key_position = base + offset
        wanted = (key_position >= tile_low) & (key_position < tile_high)
        # Keys are loaded without a mask: with one, the compiler does not see that a block is contiguous, and
        # loads two bytes at a time. Unwanted keys are in valid blocks, and their scores are masked below.
        block = tl.load(table + offset // BLOCK_TOKENS).to(tl.int64) * KV_HEADS + kv_head
        slot = offset % BLOCK_TOKENS
        keys = (
            key_pool
            + block[None, :] * (HEAD_DIM * BLOCK_TOKENS)
            + dim[:, None] * BLOCK_TOKENS
            + slot[None, :]
        )
        if HEAD_DIM == HEAD_LANES:
            k = tl.load(keys)
        else:
            k = tl.load(keys, mask=(dim < HEAD_DIM)[:, None], other=0.0)
        v = tl.load(
            value_pool + (block * BLOCK_TOKENS + slot)[:, None] * VALUE_DIM + value_dim[None, :],
            mask=wanted[:, None] & (value_dim < VALUE_DIM)[None, :],
            other=0.0,
        )
        if WIDEN:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, k, input_precision="ieee") * scaling
        if HAS_SOFTCAP:
            scores = _capped(scores, softcap)
        seen = (key_position[None, :] >= low[:, None]) & (key_position[None, :] < high[:, None])
        scores = tl.where(seen, scores * _LOG2_E, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        reference = tl.where(new_highest == -float("inf"), 0.0, new_highest)
        weights = tl.exp2(scores - reference[:, None])
        decay = tl.exp2(highest - reference)
        total = total * decay + tl.sum(weights, 1)
        sums = sums * decay[:, None]
        sums = tl.dot(weights.to(v.dtype), v, acc=sums, input_precision="ieee")
        highest = new_highest
    any_seen = total > 0
    divisor = tl.where(any_seen, total, 1.0)
    place = (row * Q_HEADS + head) * splits + split
    tl.store(lse + place, tl.where(any_seen, (highest + tl.log2(divisor)) * _LN_2, -float("inf")), mask=real)
    tl.store(
        output + place[:, None] * VALUE_DIM + value_dim[None, :],
        (sums / divisor[:, None]).to(output.dtype.element_ty),
        mask=real[:, None] & (value_dim < VALUE_DIM)[None, :],
    )


@triton.jit(do_not_specialize_on_alignment=["first_row", *_TILES])
def merge_kernel(
    partial,  # fp32 [rows, Q_HEADS, SPLITS, VALUE_DIM]
    partial_lse,  # fp32 [rows, Q_HEADS, SPLITS]
    output,  # [rows, Q_HEADS, VALUE_DIM]
    lse,  # fp32 [rows, Q_HEADS]
    tile_span,  # as attend_kernel's: only the rows of its tiles are merged
    tile_row,
    first_row,
    VALUE_DIM: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    SPLITS: tl.constexpr,  # a power of two
):
    """Programs (token of a tile, head): merge the splits' results."""
    tile = tl.program_id(0) // TILE_TOKENS
    row = tl.load(tile_row + tile) + tl.program_id(0) % TILE_TOKENS
    real = row < tl.load(first_row + tl.load(tile_span + tile) + 1)
    pair = row.to(tl.int64) * Q_HEADS + tl.program_id(1)
    split = tl.arange(0, SPLITS)
    value_dim = tl.arange(0, VALUE_LANES)
    inside = (value_dim < VALUE_DIM) & real
    parts = tl.load(partial_lse + pair * SPLITS + split, mask=(split < SPLITS) & real, other=-float("inf"))
    highest = tl.max(parts, 0)
    reference = tl.where(highest == -float("inf"), 0.0, highest)
    weights = tl.exp2((parts - reference) * _LOG2_E)
    total = tl.sum(weights, 0)
    divisor = tl.where(total > 0, total, 1.0)
    outputs = tl.load(
        partial + (pair * SPLITS + split)[:, None] * VALUE_DIM + value_dim[None, :],
        mask=(weights > 0)[:, None] & inside[None, :],
        other=0.0,
    )
    merged = tl.sum(outputs * weights[:, None], 0) / divisor
    tl.store(output + pair * VALUE_DIM + value_dim, merged.to(output.dtype.element_ty), mask=inside)
    tl.store(lse + pair, tl.where(total > 0, reference + tl.log2(divisor) * _LN_2, -float("inf")), mask=real)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def write_kernel(
    key,  # [rows, KV_HEADS, HEAD_DIM], `key_stride` elements between rows
    value,  # [rows, KV_HEADS, VALUE_DIM]
    key_pool,
    value_pool,
    slots,  # int64 [rows]; below 0: skipped
    key_stride,
    value_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_LANES: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Programs (row, KV head): write K and V of one token to its slot."""
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    slot = tl.load(slots + row)
    dim = tl.arange(0, HEAD_LANES)
    value_dim = tl.arange(0, VALUE_LANES)
    block = (slot // BLOCK_TOKENS) * KV_HEADS + kv_head
    offset = slot % BLOCK_TOKENS
    wanted = (dim < HEAD_DIM) & (slot >= 0)
    k = tl.load(key + row * key_stride + kv_head * HEAD_DIM + dim, mask=wanted, other=0.0)
    tl.store(
        key_pool + (block * HEAD_DIM + dim) * BLOCK_TOKENS + offset,
        k.to(key_pool.dtype.element_ty),
        mask=wanted,
    )
    wanted = (value_dim < VALUE_DIM) & (slot >= 0)
    v = tl.load(value + row * value_stride + kv_head * VALUE_DIM + value_dim, mask=wanted, other=0.0)
    tl.store(
        value_pool + (block * BLOCK_TOKENS + offset) * VALUE_DIM + value_dim,
        v.to(value_pool.dtype.element_ty),
        mask=wanted,
    )


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def rotate_write_kernel(
    joined,  # [rows, Q_HEADS + 2 * KV_HEADS, HEAD_DIM]: queries (rotated in place), keys, values
    cosine,  # fp32 [positions, HEAD_DIM / 2]
    sine,
    positions,  # int64 [rows]
    slots,  # int64 [rows]; below 0: keys and values are not written
    key_pool,
    value_pool,
    query_norm,  # [HEAD_DIM], with HAS_NORMS
    key_norm,
    eps,
    HAS_NORMS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # HEAD_DIM / 2
    HALF_LANES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Programs (row, head): rotate queries and keys; write keys and values to their slots."""
    HEADS: tl.constexpr = Q_HEADS + 2 * KV_HEADS
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half = tl.arange(0, HALF_LANES)
    inside = half < HALF
    source = joined + (row * HEADS + head) * (2 * HALF)
    low = tl.load(source + half, mask=inside, other=0.0)
    high = tl.load(source + HALF + half, mask=inside, other=0.0)
    slot = tl.load(slots + row)
    wanted = inside & (slot >= 0)
    block = slot // BLOCK_TOKENS
    offset = slot % BLOCK_TOKENS
    if head < Q_HEADS + KV_HEADS:
        angle = tl.load(positions + row) * HALF + half
        cos = tl.load(cosine + angle, mask=inside, other=0.0)
        sin = tl.load(sine + angle, mask=inside, other=0.0)
        left = low.to(tl.float32)
        right = high.to(tl.float32)
        if HAS_NORMS:
            squares = tl.sum(left * left, 0) + tl.sum(right * right, 0)
            scale = tl.rsqrt(squares / (2 * HALF) + eps)
            is_query = inside & (head < Q_HEADS)
            is_key = inside & (head >= Q_HEADS)
            for_low = tl.load(query_norm + half, mask=is_query, other=0.0).to(tl.float32)
            for_low += tl.load(key_norm + half, mask=is_key, other=0.0).to(tl.float32)
            for_high = tl.load(query_norm + HALF + half, mask=is_query, other=0.0).to(tl.float32)
            for_high += tl.load(key_norm + HALF + half, mask=is_key, other=0.0).to(tl.float32)
            left = left * scale * for_low
            right = right * scale * for_high
        turned_low = left * cos - right * sin
        turned_high = right * cos + left * sin
        if head < Q_HEADS:
            tl.store(source + half, turned_low.to(joined.dtype.element_ty), mask=inside)
            tl.store(source + HALF + half, turned_high.to(joined.dtype.element_ty), mask=inside)
        else:
            place = (block * KV_HEADS + head - Q_HEADS) * (2 * HALF * BLOCK_TOKENS) + offset
            target = key_pool + place + half * BLOCK_TOKENS
            tl.store(target, turned_low.to(key_pool.dtype.element_ty), mask=wanted)
            tl.store(target + HALF * BLOCK_TOKENS, turned_high.to(key_pool.dtype.element_ty), mask=wanted)
    else:
        place = (block * KV_HEADS + head - Q_HEADS - KV_HEADS) * BLOCK_TOKENS + offset
        target = value_pool + place * (2 * HALF) + half
        tl.store(target, low.to(value_pool.dtype.element_ty), mask=wanted)
        tl.store(target + HALF, high.to(value_pool.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["parts", "places"])
def copy_parts_kernel(
    parts,  # int32 [count]: indices into `host`
    places,  # int32 [count]: indices into `keys` and `values`
    host,  # [parts, KEY_WORDS + VALUE_WORDS], page-locked
    keys,  # [places, KEY_WORDS]
    values,  # [places, VALUE_WORDS]
    count,
    KEY_WORDS: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    LANES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    IS_IN: tl.constexpr,  # from the host; else to it
):
    """PROGRAMS programs: copy parts (one layer's K and V of a block) between host and device."""
    PIECES: tl.constexpr = (KEY_WORDS + VALUE_WORDS + LANES - 1) // LANES
    for piece in range(tl.program_id(0), count * PIECES, PROGRAMS):
        part = tl.load(parts + piece // PIECES).to(tl.int64)
        place = tl.load(places + piece // PIECES).to(tl.int64)
        word = piece % PIECES * LANES + tl.arange(0, LANES)
        _copy_words(host, keys, values, part, place, word, KEY_WORDS, VALUE_WORDS, IS_IN)


@triton.jit
def _copy_words(
    host,
    keys,
    values,
    part,
    place,
    word,
    KEY_WORDS: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    IS_IN: tl.constexpr,
):
    """Copy some words of one part."""
    WORDS: tl.constexpr = KEY_WORDS + VALUE_WORDS
    is_key = word < KEY_WORDS
    is_value = (word >= KEY_WORDS) & (word < WORDS)
    outside = host + part * WORDS + word
    key = keys + place * KEY_WORDS + word
    value = values + place * VALUE_WORDS + word - KEY_WORDS
    if IS_IN:
        found = tl.load(outside, mask=word < WORDS, other=0)
        tl.store(key, found, mask=is_key)
        tl.store(value, found, mask=is_value)
    else:
        tl.store(outside, tl.load(key, mask=is_key, other=0), mask=is_key)
        tl.store(outside, tl.load(value, mask=is_value, other=0), mask=is_value)


@triton.jit
def _now(IS_TIMED: tl.constexpr):
    """Return nanoseconds of the device's clock; 0 unless timed (Triton's interpreter has no clock)."""
    if IS_TIMED:
        now = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        now = tl.full([], 0, tl.int64)
    return now


@triton.jit(do_not_specialize=["layer"])
def fetch_layer_kernel(
    numbers,  # int32: see streaming.py
    host,  # host, keys and values as in copy_parts_kernel
    keys,
    values,
    stamps,  # int64 [LAYERS, 4]: began, ended, wanted, left
    layer,
    LAYERS: tl.constexpr,
    DEVICE_BLOCKS: tl.constexpr,
    KEY_WORDS: tl.constexpr,
    VALUE_WORDS: tl.constexpr,
    LANES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    IS_TIMED: tl.constexpr,
):
    """PROGRAMS programs: copy the blocks that a replayed step fetches for one layer."""
    PIECES: tl.constexpr = (KEY_WORDS + VALUE_WORDS + LANES - 1) // LANES
    if tl.program_id(0) == 0:
        tl.store(stamps + 4 * layer, _now(IS_TIMED))
    count = tl.load(numbers)
    rows = numbers + 4
    parity = (tl.load(numbers + 2) + layer) % 2
    kept = tl.where(layer < 2, tl.load(numbers + 1), 0)
    for piece in range(tl.program_id(0), (count - kept) * PIECES, PROGRAMS):
        index = kept + piece // PIECES
        part = tl.load(rows + index).to(tl.int64) * LAYERS + layer
        stays = tl.load(rows + count + index)
        buffer = tl.load(rows + (2 + parity) * count + index)
        place = tl.where(stays < 0, buffer, stays + layer * DEVICE_BLOCKS).to(tl.int64)
        word = piece % PIECES * LANES + tl.arange(0, LANES)
        _copy_words(host, keys, values, part, place, word, KEY_WORDS, VALUE_WORDS, True)
    tl.debug_barrier()
    tl.atomic_max(stamps + 4 * layer + 1, _now(IS_TIMED))


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["raw"])
def point_kernel(
    raw,  # int32: tables; an entry DEVICE_BLOCKS + i is fetched block i
    pointed,  # int32: tables of the layer
    numbers,
    layer,
    DEVICE_BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """PROGRAMS programs: write the tables for one layer."""
    count = tl.load(numbers)
    entries = tl.load(numbers + 3)
    parity = (tl.load(numbers + 2) + layer) % 2
    buffers = numbers + 4 + (2 + parity) * count
    for first in range(tl.program_id(0) * LANES, entries, PROGRAMS * LANES):
        at = first + tl.arange(0, LANES)
        code = tl.load(raw + at, mask=at < entries, other=0)
        is_passing = (at < entries) & (code >= DEVICE_BLOCKS)
        buffer = tl.load(buffers + code - DEVICE_BLOCKS, mask=is_passing, other=0)
        place = tl.where(is_passing, buffer - layer * DEVICE_BLOCKS, code)
        tl.store(pointed + at, place, mask=at < entries)


@triton.jit(do_not_specialize=["at"])
def stamp_kernel(stamps, at, IS_TIMED: tl.constexpr):
    """One program: store the current time."""
    tl.store(stamps + at, _now(IS_TIMED))


@triton.jit
def account_kernel(
    stamps,
    numbers,
    sums,  # int64 [5]: see `_SUMS` of streaming.py
    LAYERS: tl.constexpr,
    LAYER_LANES: tl.constexpr,  # LAYERS rounded up to a power of two
):
    """One program: add the timestamps of a replayed step to `sums` and reset them."""
    layer = tl.arange(0, LAYER_LANES)
    real = layer < LAYERS
    began = tl.load(stamps + 4 * layer, mask=real, other=0)
    ended = tl.load(stamps + 4 * layer + 1, mask=real, other=0)
    wanted = tl.load(stamps + 4 * layer + 2, mask=real, other=0)
    is_after = real & (layer > 0)
    left = tl.load(stamps + 4 * layer - 1, mask=is_after, other=0)  # of the previous layer
    count = tl.load(numbers)
    fetched = LAYERS * count - 2 * tl.load(numbers + 1)
    tl.store(sums, tl.load(sums) + tl.sum(tl.maximum(ended - wanted, 0), 0))
    tl.store(sums + 1, tl.load(sums + 1) + tl.sum(ended - began, 0))
    tl.store(sums + 2, tl.load(sums + 2) + LAYERS)
    tl.store(sums + 3, tl.load(sums + 3) + tl.sum((is_after & (ended < left)).to(tl.int64), 0))
    tl.store(sums + 4, tl.load(sums + 4) + fetched)
    tl.store(stamps + 4 * layer + 1, tl.zeros([LAYER_LANES], tl.int64), mask=real)
