"""Loads under which memory runs out in different ways: each is what one rung, or two, are there for. Pure.

Token ids are drawn, answers end at their limit, all requests of a turn come at once to two workers; every
turn has other ones, the same for all variants. Workers are filled evenly (worst fit), except where a rung
is there for what is uneven: best fit, which goes by prompts, gives nearly all requests to one worker, and how
nearly differs between variants.
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
    """One stack."""

    name: str
    settings: Settings = field(default_factory=dict)
    against: str = "all"
    """The variant that differs from this one by the rung alone."""


VARIANTS = (
    Variant("all", _ALL),
    Variant("again", _ALL),  # nothing differs: what comes out is the bench's own error
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
"""Prompts with the length of their answers."""


@dataclass(frozen=True)
class Workload:
    """`variants`: those of `VARIANTS` that are measured under it, what they are compared with included."""

    name: str
    about: str
    kv_blocks: int
    """Of each worker."""
    variants: tuple[str, ...]
    draw: Callable[[Random, int], Requests]
    """With the size of the vocabulary."""
    settings: Settings = field(default_factory=dict)
    model: str = str(TINY_CHAT)
    """Where what a worker computes has to outweigh what all the other processes do on the same cores: one
    with random weights."""


def _long(dice: Random, vocabulary: int) -> Requests:
    sizes = [(dice.randint(40, 200), dice.randint(80, 240)) for _ in range(20)]
    short = [(drawn_tokens(dice, vocabulary, prompt), answer) for prompt, answer in sizes]
    return [*short, (drawn_tokens(dice, vocabulary, 80 * BLOCK_TOKENS), 60)]


def _skewed(dice: Random, vocabulary: int) -> Requests:
    """Those that come first are placed together, and go on when the others have left their worker."""
    answers = [dice.randint(260, 320) for _ in range(6)] + [dice.randint(8, 16) for _ in range(6)]
    return [(drawn_tokens(dice, vocabulary, 40), answer) for answer in answers]


def _crowded(dice: Random, vocabulary: int) -> Requests:
    return [
        (drawn_tokens(dice, vocabulary, dice.randint(400, 600)), dice.randint(150, 250)) for _ in range(12)
    ]


def _repeats(dice: Random, vocabulary: int) -> Requests:
    """More beginnings than the device holds beside what runs, each coming back again and again."""
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
