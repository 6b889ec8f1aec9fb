# Kernels use Triton's types, which mypy cannot check.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Triton kernels beside attention, launched by `services.worker.engine.gpu.mlp`."""

import triton
import triton.language as tl

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def gate_kernel(
    joined,  # [rows, 2 * WIDTH]: gate, up
    output,  # [rows, WIDTH]
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    IS_GELU: tl.constexpr,  # approximated by tanh; else SiLU
):
    """Programs (row, piece): act(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * LANES + tl.arange(0, LANES)
    inside = column < WIDTH
    gate = tl.load(joined + row * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(joined + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    inner = gate
    if IS_GELU:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 · sqrt(2 / pi)
    small = tl.exp2(-tl.abs(inner) * _LOG2_E)
    share = tl.where(inner < 0, small, 1.0) / (1.0 + small)
    tl.store(output + row * WIDTH + column, (gate * share * up).to(output.dtype.element_ty), mask=inside)


@triton.jit
def norm_kernel(
    rows,  # [rows, WIDTH]
    weight,  # fp32 [WIDTH]
    residual,  # as rows, with HAS_RESIDUAL
    output,
    eps,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Programs (row): its RMS norm, plus the residual."""
    start = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, LANES)
    inside = column < WIDTH
    row = tl.load(rows + start + column, mask=inside, other=0.0).to(tl.float32)
    found = row * tl.rsqrt(tl.sum(row * row, 0) / WIDTH + eps)
    found = found * tl.load(weight + column, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        found += tl.load(residual + start + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + start + column, found.to(output.dtype.element_ty), mask=inside)


@triton.jit
def expert_kernel(
    rows,  # [pairs / CHOICES, INPUTS]
    weights,  # [EXPERTS, OUTPUTS, INPUTS]
    output,  # [pairs, OUTPUTS]
    order,  # int64 [pairs]: pairs, sorted by expert
    begins,  # int64 [EXPERTS + 1]: first place of each expert in `order`
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERT_LANES: tl.constexpr,
    CHOICES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,  # as attend_kernel's
):
    """Programs (tile of an expert's pairs, tile of outputs). Tiles beyond the last do nothing."""
    tile = tl.program_id(0)
    lane = tl.arange(0, EXPERT_LANES)
    real = lane < EXPERTS
    begin = tl.load(begins + lane, mask=real, other=0)
    tiles = (tl.load(begins + lane + 1, mask=real, other=0) - begin + ROWS - 1) // ROWS
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((real & (ends <= tile)).to(tl.int32), 0)
    if expert < EXPERTS:
        first_tile = tl.sum(tl.where(lane < expert, tiles, 0), 0)
        place = tl.load(begins + expert) + (tile - first_tile) * ROWS + tl.arange(0, ROWS)
        is_pair = place < tl.load(begins + expert + 1)
        pair = tl.load(order + place, mask=is_pair, other=0)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_output = column < OUTPUTS
        matrix = weights + expert.to(tl.int64) * (OUTPUTS * INPUTS)
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, INPUTS, DEPTH):
            depth = first + tl.arange(0, DEPTH)
            a = tl.load(
                rows + (pair // CHOICES)[:, None] * INPUTS + depth[None, :],
                mask=is_pair[:, None] & (depth < INPUTS)[None, :],
                other=0.0,
            )
            b = tl.load(
                matrix + column[None, :] * INPUTS + depth[:, None],
                mask=is_output[None, :] & (depth < INPUTS)[:, None],
                other=0.0,
            )
            if WIDEN:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            sums = tl.dot(a, b, acc=sums, input_precision="ieee")
        tl.store(
            output + pair[:, None] * OUTPUTS + column[None, :],
            sums.to(output.dtype.element_ty),
            mask=is_pair[:, None] & is_output[None, :],
        )
