"""How few workers any packing needs, and what MELL's packing promises (design §3, papers/000 §VII).

For tests and benches: both look at all items and are not cheap. It knows MELL's model, and none of its rules.
"""

from collections.abc import Iterable

from services.placement.policy.mell.cluster import LARGE, MEDIUM, SMALL, TINY, Cluster, Gpu
from services.placement.policy.mell.settings import class_of


def lower_bound(sizes: Iterable[int], capacity: int) -> int:
    """max(ceil(ΣS/C), #L + ceil(max(0, #M − #L)/2)): no packing of these sizes uses fewer workers."""
    total = larges = mediums = 0
    for size in sizes:
        total += size
        size_class = class_of(size, capacity)
        larges += size_class == LARGE
        mediums += size_class == MEDIUM
    return max(-(-total // capacity), larges + -(-max(0, mediums - larges) // 2))


def exceptions(cluster: Cluster, headroom: int = 0) -> dict[str, int]:
    """By property of Theorem 1, how many GPUs break it; an S or M "fits" when it leaves `headroom` blocks."""
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
    """Two M; or one with two S, which weigh more (7/6) and fill more (5/6): Theorem 2 holds as well."""
    return len(gpu.held[MEDIUM]) >= 2 or len(gpu.held[SMALL]) >= 2


def _with_room_for_tiny(gpus: list[Gpu], capacity: int) -> int:
    """L- and M-GPUs below three quarters, while there are T-GPUs."""
    if not any(gpu.category == TINY for gpu in gpus):
        return 0
    return sum(gpu.category in (LARGE, MEDIUM) and 4 * gpu.used < 3 * capacity for gpu in gpus)
