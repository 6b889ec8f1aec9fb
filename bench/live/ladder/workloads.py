"""Workloads that fill memory in different ways, each for one or two rungs of the ladder. Pure.

Token ids are random, answers end at their limit, and all requests of a turn arrive at two workers at once.
Every turn has new requests, the same for all variants. Placement is even (worst fit), except where a rung is
for uneven load. Best fit, which goes by prompts, gives nearly all requests to one worker, to a degree that
depends on the variant.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from bench.kit.mechanisms import CACHE, LENDING, OFF, PIE, RELIEF, Settings
from bench.kit.models import TINY_CHAT, drawn_tokens

_ALL: Settings = {"scheduler.policy": "kvasir", **OFF, **CACHE, **LENDING, **RELIEF}
_NONE: Settings = {"scheduler.policy": "kvasir", **OFF, "scheduler.policy_options.reserve_ratio": 0}


@dataclass(frozen=True)
class Variant:
    """Settings of one stack."""

    name: str
    settings: Settings = field(default_factory=dict)
    against: str = "all"
    """The variant that differs only by this rung."""


VARIANTS = (
    Variant("all", _ALL),
    Variant("again", _ALL),  # equal to `all`, to show the bench's own error
    Variant("no_evict", {**_ALL, "worker.prefix_cache.enabled": False}),
    Variant("no_host", {**_ALL, "worker.prefix_cache.host_mb": 0}),
    Variant("no_reserve", {**_ALL, "scheduler.policy_options.reserve_ratio": 0}),
    Variant("no_borrow", {**_ALL, "worker.lending.borrow": False}),
    Variant("no_migrate", {**_ALL, "scheduler.relief_off": ["migrate"]}),
    Variant("no_pause", {**_ALL, "scheduler.relief_off": ["pause"]}),
    Variant("no_swap", {**_ALL, "scheduler.relief_off": ["swap"]}),
    Variant("recompute_only", _NONE),
    Variant("expand_only", {**_NONE, **PIE}, against="recompute_only"),
)


BLOCK_TOKENS = 16
_LARGER = "random-50m"
_PACKED: Settings = {"placement.policy": "best_fit"}
_NOTHING_LENT: Settings = {"worker.lending.lend": False, "worker.lending.borrow": False}
Requests = list[tuple[list[int], int]]
"""Prompts, each with the length of its answer."""


@dataclass(frozen=True)
class Workload:
    """A workload. `variants` are those of `VARIANTS` to measure, with the ones that they are compared
    with."""

    name: str
    about: str
    kv_blocks: int
    """KV blocks of each worker."""
    variants: tuple[str, ...]
    draw: Callable[[Random, int], Requests]
    """Draws the requests, given the size of the vocabulary."""
    settings: Settings = field(default_factory=dict)
    model: str = str(TINY_CHAT)
    """A larger model with random weights, where the workers' compute must exceed the other processes' on
    the same cores."""


def _long(dice: Random, vocabulary: int) -> Requests:
    sizes = [(dice.randint(40, 200), dice.randint(80, 240)) for _ in range(20)]
    short = [(drawn_tokens(dice, vocabulary, prompt), answer) for prompt, answer in sizes]
    return [*short, (drawn_tokens(dice, vocabulary, 80 * BLOCK_TOKENS), 60)]


def _skewed(dice: Random, vocabulary: int) -> Requests:
    """Return requests of which the long ones are placed together, and continue when the short ones ended."""
    answers = [dice.randint(260, 320) for _ in range(6)] + [dice.randint(8, 16) for _ in range(6)]
    return [(drawn_tokens(dice, vocabulary, 40), answer) for answer in answers]


def _crowded(dice: Random, vocabulary: int) -> Requests:
    return [
        (drawn_tokens(dice, vocabulary, dice.randint(400, 600)), dice.randint(150, 250)) for _ in range(12)
    ]


def _repeats(dice: Random, vocabulary: int) -> Requests:
    """Return requests on more prefixes than fit on the device, each used repeatedly."""
    begins = [drawn_tokens(dice, vocabulary, 480) for _ in range(6)]
    return [(begins[at % 6] + drawn_tokens(dice, vocabulary, 24), dice.randint(24, 48)) for at in range(48)]


def _many(dice: Random, vocabulary: int) -> Requests:
    sizes = [(dice.randint(30, 60), dice.randint(160, 240)) for _ in range(24)]
    return [(drawn_tokens(dice, vocabulary, prompt), answer) for prompt, answer in sizes]


WORKLOADS = (
    Workload(
        "long",
        "20 requests, and one longer than a worker's KV",
        80,
        ("all", "no_borrow", "no_migrate", "recompute_only"),
        _long,
    ),
    Workload(
        "skewed",
        "6 long answers that outgrow the worker they came to, beside 6 short ones; nothing is lent",
        80,
        ("all", "no_migrate", "no_swap"),
        _skewed,
        {**_NOTHING_LENT, **_PACKED},
        _LARGER,
    ),
    Workload(
        "crowded",
        "12 long contexts, first come first served, on two full workers that lend nothing",
        160,
        ("all", "again", "no_swap", "no_host"),
        _crowded,
        {"scheduler.policy": "vllm", **_NOTHING_LENT},
        _LARGER,
    ),
    Workload(
        "repeats",
        "48 short answers to 6 long beginnings",
        120,
        ("all", "no_evict", "no_host", "no_swap"),
        _repeats,
    ),
    Workload(
        "many",
        "24 short prompts with long answers on two full workers",
        80,
        (
            "all",
            "no_evict",
            "no_reserve",
            "no_borrow",
            "no_migrate",
            "no_pause",
            "recompute_only",
            "expand_only",
        ),
        _many,
        model=_LARGER,
    ),
)
