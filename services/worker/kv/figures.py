"""What the prefix cache did, tier by tier, in numbers: for metrics and for people. Reads, changes nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from prometheus_client import Gauge

from services.worker.kv.core.radix_tree import Tier
from services.worker.kv.store import KvStore
from shared.metrics import gauge


@dataclass(frozen=True, slots=True)
class TierFigures:
    """What one tier did since the start."""

    tier: str
    hits: int
    """Blocks found there first, and used."""
    evictions: int
    refused: int
    """Blocks that were there, and computed instead because that was thought to be faster."""
    faults: int
    """Copies that were torn, corrupt, or could not be read or written."""
    checksum_failures: int
    loaded_bytes: int
    saved_s: float
    """What computing the blocks found there would have taken."""
    spent_s: float
    """What loading from there and filling it took the engine."""
    in_use: bool
    """False while loading from there is slower than computing."""

    @property
    def helped_s(self) -> float:
        """Did this tier help?"""
        return self.saved_s - self.spent_s


@dataclass(frozen=True, slots=True)
class CacheFigures:
    """What a prefix cache did since the start, over all tiers and tier by tier."""

    tiers: tuple[TierFigures, ...]
    hits_borrowed: int
    """Of the device's: blocks that lie at creditors."""
    misses: int
    loads_abandoned: int
    lost_unsaved: int
    prefetched: int
    saved_ahead: int
    """Blocks copied to the host before they had to leave the device."""
    saved_late: int
    """Those whose copy the engine waited for."""
    not_saved: int
    """Those that left the device without a copy: few like them come back."""
    adopted: int
    """Those that lay there already, in use."""
    kept_blocks: int
    """Of sequences that were taken off the device and are not back."""
    shadow_blocks: int
    """On the host now, of sequences that run on other workers."""
    shadow_blocks_kept: int
    """That ever were."""
    shadows_used: int
    """Of these, those that a sequence here has used."""
    shadows_dropped: int
    """Those that had to leave."""
    peer_blocks: int
    """In other workers' host memory now."""
    sent_blocks: int
    """Copied there since the start."""
    lost_peer_blocks: int
    """Of these, those that were lost with the grant, or with the creditor."""
    trouble: str = ""
    """What an eviction order from outside raised last."""

    def details(self) -> dict[str, Any]:
        """What `python -m services status` shows."""
        rows = [
            {
                **{name: getattr(tier, name) for name in ("tier", "hits", "evictions", "refused", "faults")},
                "saved_s": round(tier.saved_s, 4),
                "spent_s": round(tier.spent_s, 4),
                "in_use": tier.in_use,
            }
            for tier in self.tiers
        ]
        return {
            "prefix_hits_borrowed": self.hits_borrowed,
            "prefix_misses": self.misses,
            "prefetched_blocks": self.prefetched,
            "saved_late_blocks": self.saved_late,
            "not_saved_blocks": self.not_saved,
            "adopted_blocks": self.adopted,
            "swapped_blocks": self.kept_blocks,
            **{f.name: getattr(self, f.name) for f in fields(self) if f.name.startswith("shadow")},
            "peer_blocks": self.peer_blocks,
            "sent_blocks": self.sent_blocks,
            "lost_peer_blocks": self.lost_peer_blocks,
            "prefix_tiers": rows,
            **({"trouble": self.trouble} if self.trouble else {}),
        }


def read_figures(store: KvStore) -> CacheFigures:
    """On the engine's thread."""
    counts, gate = store.cache.counts, store.cache.gate
    faults = _faults(store)
    tiers = tuple(
        TierFigures(
            tier=tier.name.lower(),
            hits=counts[f"hits_{tier.name.lower()}"],
            evictions=counts[f"evicted_{tier.name.lower()}"],
            refused=gate.refused_blocks[tier],
            faults=sum(faults[tier].values()),
            checksum_failures=faults[tier].get("checksum_failures", 0),
            loaded_bytes=0
            if tier is Tier.DEVICE
            else counts[f"hits_{tier.name.lower()}"] * store.record_bytes,
            saved_s=gate.saved_s[tier],
            spent_s=gate.spent_s[tier],
            in_use=tier not in gate.losing,
        )
        for tier in Tier
    )
    return CacheFigures(
        tiers=tiers,
        hits_borrowed=counts["hits_borrowed"],
        misses=counts["misses"],
        loads_abandoned=counts["loads_abandoned"],
        lost_unsaved=counts["lost_unsaved"],
        prefetched=counts["prefetched"],
        saved_ahead=counts["saved_ahead"],
        saved_late=counts["saved_late"],
        not_saved=counts["not_saved"],
        adopted=counts["adopted"],
        kept_blocks=store.cache.kept_blocks,
        shadow_blocks=store.cache.shadows.blocks,
        shadow_blocks_kept=store.cache.shadows.kept_in_all,
        shadows_used=counts["shadows_used"],
        shadows_dropped=counts["shadows_dropped"],
        peer_blocks=store.cache.peers.used_blocks,
        sent_blocks=counts["sent"],
        lost_peer_blocks=counts["lost_peer"],
        trouble=store.cache.trouble,
    )


def _faults(store: KvStore) -> dict[Tier, Mapping[str, int]]:
    host = {"checksum_failures": store.mover.counts["host_checksum_failures"]}
    disk = {} if store.disk is None else dict(store.disk.counts)
    peers = {} if store.peers is None else dict(store.peers.counts)
    return {Tier.DEVICE: {}, Tier.HOST: host, Tier.DISK: disk, Tier.PEER: peers}


class CacheMetrics:
    """The figures as Prometheus gauges, set with each heartbeat."""

    def __init__(self) -> None:
        def by_tier(name: str, text: str) -> dict[str, Gauge]:
            metric = gauge(f"kvasir_worker_prefix_{name}", text, ["tier"])
            return {tier.name.lower(): metric.labels(tier.name.lower()) for tier in Tier}

        self._by_tier = {
            "hits": by_tier("hit_blocks", "Blocks found in a tier."),
            "evictions": by_tier("evicted_blocks", "Blocks that had to leave a tier."),
            "refused": by_tier("refused_blocks", "Stored blocks that were computed because that is faster."),
            "faults": by_tier("faults", "Copies that were torn, corrupt or could not be made."),
            "checksum_failures": by_tier("checksum_failures", "Copies whose bytes had changed."),
            "loaded_bytes": by_tier("loaded_bytes", "Bytes brought to the device."),
            "saved_s": by_tier("saved_seconds", "Prefill that a tier made unnecessary."),
            "spent_s": by_tier("spent_seconds", "What a tier took the engine."),
            "helped_s": by_tier("helped_seconds", "Saved less spent: did this tier help?"),
            "in_use": by_tier("tier_in_use", "0 while a tier is slower than computing and left alone."),
        }
        self._overall = {
            name: gauge(f"kvasir_worker_prefix_{name}", text)
            for name, text in (
                ("hits_borrowed", "Of the device's hits, blocks that lie at creditors."),
                ("misses", "Blocks of prompts that were stored nowhere."),
                ("loads_abandoned", "Loads given up because computing is faster."),
                ("lost_unsaved", "Blocks that left the host before they were on disk."),
                ("prefetched", "Blocks that were read ahead."),
                ("saved_ahead", "Blocks copied to the host before they had to leave the device."),
                ("saved_late", "Blocks whose copy to the host the engine waited for."),
                ("not_saved", "Blocks that left without a copy, as few like them come back."),
                ("adopted", "Blocks that were on the host already when they left the pool."),
                ("shadow_blocks", "On the host, copies of blocks of sequences that run on other workers."),
                ("shadow_blocks_kept", "Such copies made since the start."),
                ("shadows_used", "Of these, copies that a sequence here has used."),
                ("shadows_dropped", "Of these, copies that had to leave."),
                ("peer_blocks", "In host memory that other workers lend."),
                ("sent_blocks", "Copied there since the start."),
                ("lost_peer_blocks", "Of these, lost with the grant, or with the creditor."),
            )
        }

    def show(self, figures: CacheFigures) -> None:
        for tier in figures.tiers:
            for name, metrics in self._by_tier.items():
                metrics[tier.tier].set(getattr(tier, name))
        for name, metric in self._overall.items():
            metric.set(getattr(figures, name))
