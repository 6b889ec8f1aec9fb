"""The ladder of `algorithms.md` §7 with each rung switched off in turn: settings of whole stacks. Pure.

Recomputing is the last rung and cannot be left out. Pie excludes borrowing and leaves the prefix cache out,
so its rung is measured against a ladder without both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

Settings = Mapping[str, object]
_BORROWING: Settings = {"worker.lending.lend": "true", "worker.lending.borrow": "true"}
_ALL: Settings = {
    "scheduler.policy": "kvasir",
    "scheduler.relief": "true",
    "worker.prefix_cache.enabled": "true",
    **_BORROWING,
}
_NONE: Settings = {
    "scheduler.policy": "kvasir",
    "scheduler.relief": "false",
    "scheduler.policy_options.reserve_ratio": 0,
    "worker.prefix_cache.enabled": "false",
    "worker.lending.lend": "false",
    "worker.lending.borrow": "false",
}


@dataclass(frozen=True)
class Variant:
    """One stack."""

    name: str
    settings: Settings = field(default_factory=dict)
    against: str = "all"
    """The variant that differs from this one by the rung alone."""


VARIANTS = (
    Variant("all", _ALL),
    Variant("again", _ALL),  # nothing differs: what comes out is the bench's own error
    Variant("no_evict", {**_ALL, "worker.prefix_cache.enabled": "false"}),
    Variant("no_host", {**_ALL, "worker.prefix_cache.host_mb": 0}),
    Variant("no_reserve", {**_ALL, "scheduler.policy_options.reserve_ratio": 0}),
    Variant("no_borrow", {**_ALL, "worker.lending.borrow": "false"}),
    Variant("no_migrate", {**_ALL, "scheduler.relief_off": '["migrate"]'}),
    Variant("no_pause", {**_ALL, "scheduler.relief_off": '["pause"]'}),
    Variant("no_swap", {**_ALL, "scheduler.relief_off": '["swap"]'}),
    Variant("recompute_only", _NONE),
    Variant("expand_only", {**_NONE, "worker.pie.enabled": "true"}, against="recompute_only"),
)
