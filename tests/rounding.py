"""How far from the exact result rounding alone may bring a correct computation: bounds for tests of numerics.

From forward error analysis, not from what one machine showed: processors sum in other orders and widths, with
fused products and without. γ(n) = n·u / (1 − n·u) bounds a sum of n products in any order; u is the unit
roundoff. Exact results are computed in double. Source: N. Higham, Accuracy and Stability of Numerical
Algorithms, 2nd edition, §3.1, §3.5 and §4.2.
"""

import math

import torch

UNITS = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
EXPONENTIAL = 16 * UNITS[torch.float32]
"""Relative error allowed to an fp32 exponential, hyperbolic tangent or logistic function, together with what
is added to it and divided by it."""
_STEEPEST_SILU = 1.1
"""Its derivative is nowhere larger."""


def gamma(terms: int, dtype: torch.dtype = torch.float32) -> float:
    """γ(terms). Raises ValueError where there is no bound any more."""
    off = terms * UNITS[dtype]
    if off >= 1:
        raise ValueError(f"a sum of {terms} in {dtype} may be anything")
    return off / (1 - off)


def product_bound(a: torch.Tensor, weight: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
    """Of `a` `[n, k]` · `weight`ᵀ `[k, m]` (+ `added`) in fp32, for each element, `[n, m]` in double."""
    sizes = a.double().abs() @ weight.double().abs().T
    if added is not None:
        sizes = sizes + added.double().abs()
    return gamma(a.shape[1] + 1) * sizes


def gated_bound(a: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Of silu(`a` · `gate`ᵀ) · (`a` · `up`ᵀ): both products' errors, carried through."""
    doubled = a.double()
    gates, ups = doubled @ gate.double().T, doubled @ up.double().T
    gate_off, up_off = product_bound(a, gate), product_bound(a, up)
    silu = torch.nn.functional.silu(gates).abs()
    silu_off = _STEEPEST_SILU * gate_off
    silu_off = silu_off + EXPONENTIAL * (silu + silu_off)
    off = silu_off * (ups.abs() + up_off) + silu * up_off
    return off + UNITS[torch.float32] * (silu * ups.abs() + off) + 1e-30  # an exponential may end at e^±87


def attention_bounds(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    *,
    most_keys: int,
    softcap: float | None = None,
    parts: int = 1,
) -> tuple[float, float]:
    """Of softmax attention in fp32: absolute errors of any output and of any log-sum-exp (natural).

    Heads' vectors are the last dimension of `query` and `values`, and of `keys` unless they are a pool's
    (`[…, dim, slot]`: give it transposed). No row sees more than `most_keys`; what nobody sees may be NaN.
    With `parts` the keys are cut into as many, which are merged.

    A score is off by γ(dim) · ‖q‖ · ‖k‖ at most (Cauchy-Schwarz), so each weight by twice that, relatively.
    """
    dim = query.shape[-1]
    size = scaling * _longest(query) * _longest(keys)
    score_off = gamma(dim + 2) * size
    if softcap is not None:
        score_off += EXPONENTIAL * min(size, softcap)
    # The exponent is a difference of scores, perhaps in base 2: three roundings of numbers of that size.
    weight_off = score_off + 4 * UNITS[torch.float32] * min(size, softcap or size) + EXPONENTIAL
    weight_off = parts * weight_off + gamma(most_keys + 2 * parts)
    output_off = (math.expm1(2 * weight_off) + gamma(most_keys + 2 * parts)) * _largest(values)
    lse_size = size + math.log(max(2, most_keys))
    return output_off, weight_off + 4 * parts * UNITS[torch.float32] * lse_size


def merge_bounds(outputs: torch.Tensor, lses: torch.Tensor) -> tuple[float, float]:
    """Of merging `[parts, …, dim]` by their log-sum-exps in fp32, one after the other or all at once."""
    parts = outputs.shape[0]
    size = _largest(lses.nan_to_num(0.0, 0.0, 0.0)) + math.log(parts)
    weight_off = parts * (4 * UNITS[torch.float32] * size + EXPONENTIAL) + gamma(2 * parts)
    return math.expm1(2 * weight_off) * _largest(outputs), weight_off + 4 * UNITS[torch.float32] * size


def assert_within(actual: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor | float) -> None:
    """AssertionError, with the worst place, where `actual` is further from `exact` than `bound`, or is NaN.
    Infinities have to be equal."""
    mine, theirs = actual.detach().cpu().double(), exact.detach().cpu().double()
    off = torch.where(mine == theirs, 0.0, (mine - theirs).abs())
    allowed = torch.as_tensor(bound, dtype=torch.float64).expand_as(off)
    wrong = ~(off <= allowed)
    if bool(wrong.any()):
        worst = int(torch.where(wrong, (off - allowed).nan_to_num(torch.inf), -torch.inf).argmax())
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} are off by more than rounding explains; the worst, at "
            f"{worst}, is {float(mine.flatten()[worst])} where {float(theirs.flatten()[worst])} ± "
            f"{float(allowed.flatten()[worst]):.3g} is due"
        )


def _longest(vectors: torch.Tensor) -> float:
    return float(vectors.detach().double().norm(dim=-1).nan_to_num(0.0).max()) if vectors.numel() else 0.0


def _largest(values: torch.Tensor) -> float:
    return float(values.detach().double().abs().nan_to_num(0.0).max()) if values.numel() else 0.0
