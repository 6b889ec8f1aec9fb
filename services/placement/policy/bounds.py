"""Lower bound on workers for any packing, and checks of MELL's guarantees (design §3, papers/000 §VII).

For tests and benchmarks only: both functions scan all items.
"""

from collections.abc import Iterable

from services.placement.policy.mell.cluster import LARGE, MEDIUM, SMALL, TINY, Cluster, Gpu
from services.placement.policy.mell.settings import class_of


def lower_bound(sizes: Iterable[int], capacity: int) -> int:
    """Return max(ceil(ΣS/C), #L + ceil(max(0, #M − #L)/2)): no packing of `sizes` uses fewer workers."""
    total = larges = mediums = 0
    for size in sizes:
        total += size
        size_class = class_of(size, capacity)
        larges += size_class == LARGE
        mediums += size_class == MEDIUM
    return max(-(-total // capacity), larges + -(-max(0, mediums - larges) // 2))


def exceptions(cluster: Cluster, headroom: int = 0) -> dict[str, int]:
    """Return the GPUs that violate each property of Theorem 1. S and M must leave `headroom` blocks."""
    gpus = list(cluster.active.values())
    middles = [
        item.size
        for gpu in gpus
        if gpu.category != LARGE
        for shelf in (gpu.held[SMALL], gpu.held[MEDIUM])
        for item in shelf
    ]
    smallest = min(middles, default=None)
    return {
        "two M": sum(gpu.category == MEDIUM and not _is_complete_medium(gpu) for gpu in gpus),
        "three S": sum(gpu.category == SMALL and len(gpu.held[SMALL]) < 3 for gpu in gpus),
        "T at 3/4": sum(gpu.category == TINY and 4 * gpu.used < 3 * cluster.capacity for gpu in gpus),
        "L takes M or S": sum(
            smallest is not None and gpu.companion_room - headroom >= smallest for gpu in gpus
        ),
        "T only beside full": _with_room_for_tiny(gpus, cluster.capacity),
    }


def _is_complete_medium(gpu: Gpu) -> bool:
    """Return whether it holds two M, or one M and two S: those weigh 7/6 and fill 5/6, so Theorem 2 holds."""
    return len(gpu.held[MEDIUM]) >= 2 or len(gpu.held[SMALL]) >= 2


def _with_room_for_tiny(gpus: list[Gpu], capacity: int) -> int:
    """Return the number of L- and M-GPUs below three quarters full, 0 if there are no T-GPUs."""
    if not any(gpu.category == TINY for gpu in gpus):
        return 0
    return sum(gpu.category in (LARGE, MEDIUM) and 4 * gpu.used < 3 * capacity for gpu in gpus)
