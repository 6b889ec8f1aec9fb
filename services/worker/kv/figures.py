"""Figures of the prefix cache, per tier and overall, for metrics and for people."""

from dataclasses import dataclass
from typing import Any

from services.worker.kv.core.radix_tree import Tier
from services.worker.kv.store import KvStore
from shared.metrics import gauge

BY_TIER = {
    "hits": ("hit_blocks", "Blocks found in a tier."),
    "evictions": ("evicted_blocks", "Blocks that had to leave a tier."),
    "refused": ("refused_blocks", "Stored blocks that were computed because that is faster."),
    "faults": ("faults", "Copies that were torn, corrupt or could not be made."),
    "checksum_failures": ("checksum_failures", "Copies whose bytes had changed."),
    "loaded_bytes": ("loaded_bytes", "Bytes brought to the device."),
    "saved_s": ("saved_seconds", "Prefill that a tier made unnecessary."),
    "spent_s": ("spent_seconds", "Time that a tier took the engine."),
    "helped_s": ("helped_seconds", "Saved less spent: did this tier help?"),
    "in_use": ("tier_in_use", "0 while a tier is slower than computing and left alone."),
}
"""Metric and help of each figure of a tier."""
OVERALL = {
    "hits_borrowed": "Of the device's hits, blocks that lie at creditors.",
    "misses": "Blocks of prompts that were stored nowhere.",
    "loads_abandoned": "Loads given up because computing is faster.",
    "lost_unsaved": "Blocks that left the host before they were on disk.",
    "prefetched": "Blocks that were read ahead.",
    "saved_ahead": "Blocks copied to the host before they had to leave the device.",
    "saved_late": "Blocks whose copy to the host the engine waited for.",
    "not_saved": "Blocks that left without a copy, as few like them come back.",
    "adopted": "Blocks that were on the host already when they left the pool.",
    "shadow_blocks": "On the host, copies of blocks of sequences that run on other workers.",
    "shadow_blocks_kept": "Such copies made since the start.",
    "shadows_used": "Of these, copies that a sequence here has used.",
    "shadows_dropped": "Of these, copies that had to leave.",
    "peer_blocks": "In host memory that other workers lend.",
    "sent_blocks": "Copied there since the start.",
    "lost_peer_blocks": "Of these, lost with the grant, or with the creditor.",
}
"""Help of each figure of the whole cache."""
_RENAMED = {
    "hits_borrowed": "prefix_hits_borrowed",
    "misses": "prefix_misses",
    "prefetched": "prefetched_blocks",
    "saved_late": "saved_late_blocks",
    "not_saved": "not_saved_blocks",
    "adopted": "adopted_blocks",
}
"""Other names of figures in a worker's status, which leaves out `_HIDDEN`."""
_HIDDEN = {"loads_abandoned", "lost_unsaved", "saved_ahead"}


@dataclass(frozen=True, slots=True)
class CacheFigures:
    """Figures since the start; the keys are those of `BY_TIER` and `OVERALL`."""

    tiers: dict[Tier, dict[str, float]]
    overall: dict[str, int]
    kept_blocks: int
    """Blocks of preempted sequences."""
    trouble: str
    """Last error of an eviction order from outside."""

    def details(self) -> dict[str, Any]:
        """For `python -m services status`."""
        names = ("hits", "evictions", "refused", "faults")
        rows = [
            {
                "tier": tier.name.lower(),
                **{name: each[name] for name in names},
                "saved_s": round(each["saved_s"], 4),
                "spent_s": round(each["spent_s"], 4),
                "in_use": bool(each["in_use"]),
            }
            for tier, each in self.tiers.items()
        ]
        return {
            **{_RENAMED.get(name, name): self.overall[name] for name in OVERALL if name not in _HIDDEN},
            "swapped_blocks": self.kept_blocks,
            "prefix_tiers": rows,
            **({"trouble": self.trouble} if self.trouble else {}),
        }


def read_figures(store: KvStore) -> CacheFigures:
    """Return the figures; on the engine's thread."""
    cache, counts = store.cache, store.cache.counts
    overall = {name: counts[name] for name in OVERALL} | {
        "shadow_blocks": len(cache.shadows),
        "shadow_blocks_kept": cache.shadows.kept_in_all,
        "peer_blocks": cache.peers.slots.used,
        "sent_blocks": counts["written_peer"],
        "lost_peer_blocks": counts["lost_peer"],
    }
    tiers = {tier: _of_tier(store, tier) for tier in Tier}
    return CacheFigures(tiers, overall, cache.kept_blocks, cache.trouble)


def _of_tier(store: KvStore, tier: Tier) -> dict[str, float]:
    counts, gate, name = store.cache.counts, store.cache.gate, tier.name.lower()
    below = {Tier.HOST: store.host, Tier.DISK: store.disk, Tier.PEER: store.peers}.get(tier)
    faults = {} if below is None else below.counts
    hits = counts[f"hits_{name}"]
    return {
        "hits": hits,
        "evictions": counts[f"evicted_{name}"],
        "refused": gate.refused_blocks[tier],
        "faults": sum(faults.values()),
        "checksum_failures": faults.get("checksum_failures", 0),
        "loaded_bytes": 0 if tier is Tier.DEVICE else hits * store.record_bytes,
        "saved_s": gate.saved_s[tier],
        "spent_s": gate.spent_s[tier],
        "helped_s": gate.saved_s[tier] - gate.spent_s[tier],
        "in_use": tier not in gate.losing,
    }


class CacheMetrics:
    """The figures as Prometheus gauges, set with each heartbeat."""

    def __init__(self) -> None:
        metrics = {
            name: gauge(f"kvasir_worker_prefix_{metric}", text, ["tier"])
            for name, (metric, text) in BY_TIER.items()
        }
        self._by_tier = {
            (tier, name): metric.labels(tier.name.lower())
            for tier in Tier
            for name, metric in metrics.items()
        }
        self._overall = {name: gauge(f"kvasir_worker_prefix_{name}", text) for name, text in OVERALL.items()}

    def show(self, figures: CacheFigures) -> None:
        for (tier, name), metric in self._by_tier.items():
            metric.set(figures.tiers[tier][name])
        for name, metric in self._overall.items():
            metric.set(figures.overall[name])
