"""Options of policies (`PolicySettings.options`): ranges and defaults.

Source: papers/003 §2.3 (padding, reserve), §3.3 (slack ranges), §3.4 (buffer), §4 (SLO scale, figure 12).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields

from services.scheduler.policy.contract import PASSING_SHARE, Reader, read_options

LENGTHS = ("mean", "p50", "p80", "p90", "p95")
"""Figure of a prediction that is padded and allocated; `mean` is `rl_tokens`."""


@dataclass(frozen=True, slots=True)
class TwoQueueOptions:
    """Parameters of a policy with two queues (`two_queues.py`)."""

    pad: float = 0.15
    """Share by which predicted lengths are raised."""
    length: str = "mean"
    reserve_ratio: float = 0.03
    """Share of the capacity kept for prompts and for answers longer than predicted."""
    buffer: float = 0.15
    """β: share of a slot that a hosted sequence must leave before its host arrives."""
    slo_scale: float = 2.0
    """Deadline as a multiple of the request's own duration."""
    tfs_tokens: int = 0
    """Target forward size: tokens per step that saturate the device; 0: the token budget."""
    aging_s: float = 10.0
    """Lateness in seconds after which a job gets a share of the admissions."""
    aging_share: float = 0.25
    default_tokens: int = 512
    """Assumed answer length without a prediction."""
    slack_edges_s: tuple[float, ...] = (0.2, 0.5, 2.0)
    """Bounds between the slack classes, ascending."""
    passing_share: float = PASSING_SHARE
    """`kvasir`: share of started work that may pass older waiting work."""


def _number(low: float, high: float) -> Reader:
    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(f"a number from {low:g} to {high:g}")
        return float(value)

    return read


def _tokens(low: int) -> Reader:
    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ValueError(f"a whole number, at least {low}")
        return value

    return read


def _length(value: object) -> str:
    if not isinstance(value, str) or value not in LENGTHS:
        raise ValueError(f"one of: {', '.join(LENGTHS)}")
    return value


_edge = _number(-86_400, 86_400)


def _edges(value: object) -> tuple[float, ...]:
    edges = [_edge(edge) for edge in value] if isinstance(value, list | tuple) else []
    if not edges or len(edges) > 16 or edges != sorted(set(edges)):
        raise ValueError("up to 16 ascending seconds, like [0.2, 2]")
    return tuple(edges)


_READERS: Mapping[str, Reader] = {
    "pad": _number(0.0, 10.0),
    "length": _length,
    "reserve_ratio": _number(0.0, 0.5),
    "buffer": _number(0.0, 1.0),
    "slo_scale": _number(0.01, 1e6),
    "tfs_tokens": _tokens(0),
    "aging_s": _number(0.0, 1e9),
    "aging_share": _number(0.01, 1.0),
    "default_tokens": _tokens(1),
    "slack_edges_s": _edges,
    "passing_share": _number(0.0, 0.99),
}


def two_queue_options(
    policy: str,
    options: Mapping[str, object],
    defaults: Mapping[str, float] | None = None,
    names: Collection[str] | None = None,
) -> TwoQueueOptions:
    """Return the options over the policy's defaults; `names`: those that it uses. Raises ConfigError."""
    usual = {
        field.name: field.default for field in fields(TwoQueueOptions) if names is None or field.name in names
    }
    return TwoQueueOptions(**read_options(policy, options, {**usual, **(defaults or {})}, _READERS))
