"""Adversarial sizes for MELL, and its worst ratio of GPUs to the lower bound.

The ratio is (GPUs − 6) / LB, design §3: at most 4/3 on random histories and 3/2 on these. Here every size is
just above a class border, or large items leave before their companions.
"""

import random
from collections.abc import Iterator

from services.placement.policy import create_packing
from services.placement.policy.bounds import lower_bound
from services.placement.policy.contract import PackingPolicy

CAPACITY = 1000
ADDITIVE = 6
STREAMS = ("just_medium", "just_small", "just_large", "pairs", "border_mix", "large_leave", "small_to_medium")


def worst_ratio(policy_name: str, stream: str, count: int, seed: int) -> tuple[float, int]:
    """Return the greatest (GPUs − 6) / LB, and the most moves of an operation, bundles counted once."""
    policy = create_packing(policy_name, CAPACITY)
    for index in range(2 * count + 8):
        policy.add_worker(f"w{index:05d}")
    sizes: dict[int, int] = {}
    worst, moves = 0.0, 0
    for step, (request, blocks) in enumerate(_stream(stream, count, random.Random(f"{seed}/{stream}"))):
        moves = max(moves, _apply(policy, sizes, request, blocks))
        if step % 16 == 15 and sizes:
            bound = lower_bound(sizes.values(), CAPACITY)
            worst = max(worst, (policy.active_workers - ADDITIVE) / bound)
    return worst, moves


def _apply(policy: PackingPolicy, sizes: dict[int, int], request: int, blocks: int) -> int:
    """Apply one operation; 0 blocks ends the request."""
    if blocks == 0:
        del sizes[request]
        return policy.end(request).item_moves
    effects = (policy.grow if request in sizes else policy.allocate)(request, blocks)
    sizes[request] = blocks
    return effects.item_moves


def _stream(name: str, count: int, draw: random.Random) -> Iterator[tuple[int, int]]:
    """Yield (request, new size); size 0 ends the request."""
    third, half, quarter = CAPACITY // 3 + 1, CAPACITY // 2 + 1, CAPACITY // 4 + 1
    if name in ("just_medium", "just_small", "just_large"):
        size = {"just_medium": third + 6, "just_small": quarter, "just_large": half}[name]
        yield from ((request, size) for request in range(count))
    elif name == "pairs":
        yield from ((request, half if request % 2 else third) for request in range(count))
    elif name == "border_mix":
        borders = (quarter, third, half, CAPACITY // 8 + 1, CAPACITY // 8)
        yield from _churn(count, borders, draw)
    elif name == "large_leave":
        yield from ((request, half if request % 2 else third) for request in range(count))
        yield from ((request, 0) for request in range(1, count, 2))
    else:
        yield from ((request, quarter) for request in range(count))
        yield from ((request, third) for request in range(0, count, 3))


def random_stream(policy_name: str, count: int, seed: int) -> tuple[float, int]:
    """Like `worst_ratio`, with uniformly drawn sizes that grow and end."""
    draw = random.Random(f"{seed}/random")
    policy = create_packing(policy_name, CAPACITY)
    for index in range(count + 8):
        policy.add_worker(f"w{index:05d}")
    sizes: dict[int, int] = {}
    worst, moves = 0.0, 0
    for step, (request, blocks) in enumerate(_churn(count, tuple(range(10, 900, 10)), draw)):
        moves = max(moves, _apply(policy, sizes, request, blocks))
        if step % 16 == 15 and sizes:
            bound = lower_bound(sizes.values(), CAPACITY)
            worst = max(worst, (policy.active_workers - ADDITIVE) / bound)
    return worst, moves


def _churn(count: int, borders: tuple[int, ...], draw: random.Random) -> Iterator[tuple[int, int]]:
    """Yield arrivals, half of them followed by a growth to a larger size or an end."""
    living: dict[int, int] = {}
    for request in range(count):
        living[request] = draw.choice(borders)
        yield request, living[request]
        if draw.random() < 0.5:
            other = draw.choice(list(living)) if len(living) < 64 else request - draw.randrange(32)
            if other not in living:
                continue
            larger = [size for size in borders if size > living[other]]
            if larger and draw.random() < 0.5:
                living[other] = min(larger)
                yield other, living[other]
            else:
                del living[other]
                yield other, 0
