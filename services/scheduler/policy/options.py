"""What `kvasir` and the EcoServe family let be set: `PolicySettings.options`, with ranges and defaults.

Source: papers/003 §2.3 (padding, reserve), §3.3 (slack ranges), §3.4 (buffer), §4 (SLO scale, figure 12).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from shared.errors import ConfigError

LENGTHS = ("mean", "p50", "p80", "p90", "p95")
"""Which of a prediction's figures is padded and allocated; `mean` is its `rl_tokens`."""


@dataclass(frozen=True, slots=True)
class TwoQueueOptions:
    """Parameters of a policy with two queues (`two_queues.py`), at one worker."""

    pad: float = 0.15
    """Share that a predicted length is raised by."""
    length: str = "mean"
    reserve_ratio: float = 0.03
    """Share of the capacity kept for prompts and for answers longer than predicted."""
    buffer: float = 0.15
    """β: share of a slot that a hosted sequence has to leave before its host arrives."""
    slo_scale: float = 2.0
    """A deadline is so many times what the request takes on its own."""
    tfs_tokens: int = 0
    """Target forward size: tokens in one step that saturate the device; 0 is the token budget."""
    aging_s: float = 10.0
    """One overdue by more than this has a share of the admissions."""
    aging_share: float = 0.25
    default_tokens: int = 512
    """Answer length taken for a sequence that nobody has predicted (yet)."""
    slack_edges_s: tuple[float, ...] = (0.2, 0.5, 2.0)
    """Bounds between the slack classes, ascending."""


def _number(name: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(
            f"policy option {name!r} is {value!r}; write a number from {low:g} to {high:g}", param=name
        )
    return float(value)


def _tokens(name: str, value: object, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(
            f"policy option {name!r} is {value!r}; write a whole number, at least {low}", param=name
        )
    return value


def _edges(value: object) -> tuple[float, ...]:
    edges = tuple(value) if isinstance(value, list | tuple) else ()
    numbers = tuple(_number("slack_edges_s", edge, -86_400, 86_400) for edge in edges)
    if not numbers or len(numbers) > 16 or list(numbers) != sorted(set(numbers)):
        raise ConfigError(
            f"policy option 'slack_edges_s' is {value!r}; write up to 16 ascending seconds, like [0.2, 2]",
            param="slack_edges_s",
        )
    return numbers


_RANGES = {
    "pad": (0.0, 10.0),
    "reserve_ratio": (0.0, 0.5),
    "buffer": (0.0, 1.0),
    "slo_scale": (0.01, 1e6),
    "aging_s": (0.0, 1e9),
    "aging_share": (0.01, 1.0),
}


def parse_options(
    options: Mapping[str, object], defaults: Mapping[str, float] | None = None
) -> TwoQueueOptions:
    """The named options over their defaults, or over the policy's own. Raises ConfigError, which
    names the option and what to write."""
    known = sorted(field.name for field in fields(TwoQueueOptions))
    values: dict[str, object] = dict(defaults or {})
    for name, value in options.items():
        if name in _RANGES:
            values[name] = _number(name, value, *_RANGES[name])
        elif name in ("tfs_tokens", "default_tokens"):
            values[name] = _tokens(name, value, 0 if name == "tfs_tokens" else 1)
        elif name == "slack_edges_s":
            values[name] = _edges(value)
        elif name == "length":
            if value not in LENGTHS:
                raise ConfigError(
                    f"policy option 'length' is {value!r}; write one of: {', '.join(LENGTHS)}", param=name
                )
            values[name] = value
        else:
            raise ConfigError(f"policy option {name!r} is not known; known: {', '.join(known)}", param=name)
    return TwoQueueOptions(**values)  # type: ignore[arg-type]
