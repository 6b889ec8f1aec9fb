"""The rungs of the relief ladder for `bench together --rungs`, and loads made for them.

Pure. Each load has variants that differ from `all` by one rung that is off. All requests of a turn arrive at
two workers at once.
"""

from collections.abc import Callable, Iterator, Mapping
from random import Random

from bench.kit.models import drawn_tokens
from bench.kit.stacks import CACHE, LENDING, OFF, PIE, RELIEF, Settings
from bench.live.together.workloads import BLOCK_TOKENS, Request, Workload

_ALL: Settings = {"scheduler.policy": "kvasir", **OFF, **CACHE, **LENDING, **RELIEF}
_NONE: Settings = {"scheduler.policy": "kvasir", **OFF, "scheduler.policy_options.reserve_ratio": 0}
VARIANTS: Mapping[str, Settings] = {
    "all": _ALL,
    "again": _ALL,  # equal to `all`, to show the bench's own error
    "no_evict": {**_ALL, "worker.prefix_cache.enabled": False},
    "no_host": {**_ALL, "worker.host_memory.cache_share": 0},
    "no_reserve": {**_ALL, "scheduler.policy_options.reserve_ratio": 0},
    "no_borrow": {**_ALL, "worker.lending.borrow": False},
    "no_migrate": {**_ALL, "scheduler.relief_off": ["migrate"]},
    "no_pause": {**_ALL, "scheduler.relief_off": ["pause"]},
    "no_swap": {**_ALL, "scheduler.relief_off": ["swap"]},
    "recompute_only": _NONE,
    "expand_only": {**_NONE, **PIE},
}
AGAINST = {"expand_only": "recompute_only"}
"""The variant that differs by this rung alone, where it is not `all`."""
_EVEN: Settings = {"placement.policy": "worst_fit", "scheduler.max_batch_sequences": 32}
_LARGER = "random-50m"
"""A larger model, where the workers' compute must exceed the other processes' on the same cores."""
Draw = Callable[[Random, int], Iterator[Request]]
"""Yields requests, given the size of the vocabulary."""


def _sized(prompt: tuple[int, int], answer: tuple[int, int]) -> Draw:
    """Return a draw of requests with lengths in these ranges."""

    def drawn(dice: Random, vocabulary: int) -> Iterator[Request]:
        while True:
            yield Request(drawn_tokens(dice, vocabulary, dice.randint(*prompt)), dice.randint(*answer))

    return drawn


def _long(dice: Random, vocabulary: int) -> Iterator[Request]:
    yield Request(drawn_tokens(dice, vocabulary, 80 * BLOCK_TOKENS), 60)
    yield from _sized((40, 200), (80, 240))(dice, vocabulary)


def _skewed(dice: Random, vocabulary: int) -> Iterator[Request]:
    """Yield long answers that are placed together, then short ones, which end before them."""
    for answers in ([(260, 320)] * 6, [(8, 16)] * 6):
        for answer in answers:
            yield Request(drawn_tokens(dice, vocabulary, 40), dice.randint(*answer))


def _repeats(dice: Random, vocabulary: int) -> Iterator[Request]:
    """Yield requests on more prefixes than fit on the device, each used repeatedly."""
    begins = [drawn_tokens(dice, vocabulary, 480) for _ in range(6)]
    while True:
        for begin in begins:
            yield Request(begin + drawn_tokens(dice, vocabulary, 24), dice.randint(24, 48))


def _workload(
    name: str, about: str, kv_blocks: int, count: int, few: int, draw: Draw, sides: str, more: Settings
) -> Workload:
    """Return a load of `count` requests, or `few` in a quick run, that all come at once."""
    model = _LARGER if name in ("skewed", "crowded", "many") else ""
    settings = {**_EVEN, **more}
    return Workload(
        name, about, count, few, count, draw, True, kv_blocks, settings, tuple(sides.split()), model
    )


_ALONE: Settings = {"worker.lending.lend": False, "worker.lending.borrow": False}
_PACKED: Settings = {**_ALONE, "placement.policy": "best_fit"}
_IN_ORDER: Settings = {**_ALONE, "scheduler.policy": "vllm"}
_MANY = "all no_evict no_reserve no_borrow no_migrate no_pause recompute_only expand_only"
_LONG = "all no_borrow no_migrate recompute_only"
_CROWDED = _sized((400, 600), (150, 250))
WORKLOADS = (
    _workload("long", "20 requests, and one longer than a worker", 80, 21, 6, _long, _LONG, {}),
    _workload("skewed", "6 long and 6 short answers", 80, 12, 12, _skewed, "all no_migrate no_swap", _PACKED),
    _workload("crowded", "long contexts", 160, 12, 4, _CROWDED, "all again no_swap no_host", _IN_ORDER),
    _workload("repeats", "6 long prefixes", 120, 48, 12, _repeats, "all no_evict no_host no_swap", {}),
    _workload("many", "long answers", 80, 24, 8, _sized((30, 60), (160, 240)), _MANY, {}),
)
