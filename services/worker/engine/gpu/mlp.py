"""Launches of the Triton kernels beside attention: norms, gates, and mixtures of experts.

Tensors are contiguous and on one CUDA device, or in host memory for Triton's interpreter."""

import torch
import triton

from services.worker.engine.gpu import mlp_kernels
from services.worker.engine.gpu.attention import INTERPRETED, launch

_GATE_LANES = 1024
_FEW_ROWS, _MANY_ROWS = 16, 64
"""Rows of a tile of one expert, for few and for many rows."""
_COLUMNS, _DEPTH = 64, 64


def gated(joined: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """Return act(gate) · up of `[rows, 2 · width]`. `activation`: silu or gelu_pytorch_tanh."""
    rows, both = joined.shape
    output = joined.new_empty(rows, both // 2)
    grid = (rows, triton.cdiv(both // 2, _GATE_LANES))
    launch(
        mlp_kernels.gate_kernel,
        grid,
        (joined, output),
        WIDTH=both // 2,
        LANES=_GATE_LANES,
        IS_GELU=activation != "silu",
        num_warps=4,
    )
    return output


def normed(
    rows: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the RMS norm of `[rows, width]`, plus `residual`. `weight` is fp32."""
    output = torch.empty_like(rows)
    lanes = triton.next_power_of_2(rows.shape[1])
    launch(
        mlp_kernels.norm_kernel,
        (rows.shape[0],),
        (rows, weight, rows if residual is None else residual, output, eps),
        WIDTH=rows.shape[1],
        LANES=lanes,
        HAS_RESIDUAL=residual is not None,
        num_warps=8 if lanes >= 2048 else 4,
    )
    return output


def mixed(
    rows: torch.Tensor,
    shares: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Return the weighted sum of each row's experts `[rows, width]`.

    `shares`, `chosen` `[rows, choices]`; `gate_up` `[experts, 2 · inner, width]`, `down` `[experts, width,
    inner]`. Rows are sorted by expert, so that each expert's weights are read once for a tile of rows."""
    experts, count = down.shape[0], chosen.numel()
    by_expert, order = torch.sort(chosen.flatten(), stable=True)
    begins = torch.searchsorted(by_expert, torch.arange(experts + 1, device=rows.device))
    tile_rows = _FEW_ROWS if count <= 2 * experts * _FEW_ROWS else _MANY_ROWS
    inner = _multiplied(rows, gate_up, order, begins, tile_rows, chosen.shape[1])
    found = _multiplied(gated(inner, activation), down, order, begins, tile_rows, 1)
    found = found.view(*chosen.shape, -1)
    return (found * shares[..., None].to(found.dtype)).sum(1)


def compile_experts(
    row: torch.Tensor, choices: int, gate_up: torch.Tensor, down: torch.Tensor, activation: str
) -> None:
    """Compile the kernels of `mixed` for both sizes of tiles. `row` `[1, width]`."""
    if INTERPRETED:
        return
    for rows in (1, 2 * len(down) * _FEW_ROWS // choices + 1):
        chosen = torch.zeros(rows, choices, dtype=torch.int64, device=row.device)
        mixed(row.expand(rows, -1).contiguous(), chosen.float(), chosen, gate_up, down, activation)


def _multiplied(
    rows: torch.Tensor,
    weights: torch.Tensor,
    order: torch.Tensor,
    begins: torch.Tensor,
    tile_rows: int,
    choices: int,
) -> torch.Tensor:
    """Return each pair's row times its expert's matrix, `[pairs, outputs]`; pair p has row p / `choices`."""
    experts, outputs, inputs = weights.shape
    pairs = order.shape[0]
    output = rows.new_empty(pairs, outputs)
    most_tiles = min(pairs, triton.cdiv(pairs, tile_rows) + experts)
    launch(
        mlp_kernels.expert_kernel,
        (most_tiles, triton.cdiv(outputs, _COLUMNS)),
        (rows, weights, output, order, begins),
        INPUTS=inputs,
        OUTPUTS=outputs,
        EXPERTS=experts,
        EXPERT_LANES=triton.next_power_of_2(experts),
        CHOICES=choices,
        ROWS=tile_rows,
        COLUMNS=_COLUMNS,
        DEPTH=_DEPTH,
        WIDEN=INTERPRETED,
        num_warps=4,
    )
    return output
