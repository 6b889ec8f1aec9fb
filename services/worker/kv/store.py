"""The prefix cache of one worker with its real tiers: opened, flushed and closed."""

from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Protocol, runtime_checkable

from services.worker.core.settings import PrefixCacheConfig
from services.worker.kv.audit import SampledAudit
from services.worker.kv.core.block_manager import Tiers
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.core.grown_pool import GrownPool
from services.worker.kv.core.load_policy import CostGate
from services.worker.kv.core.prefix_cache import PrefixCache
from services.worker.kv.core.radix_tree import Tier
from services.worker.kv.tiers.copier import TierMover
from services.worker.kv.tiers.disk import DiskTier, Geometry, open_disk
from services.worker.kv.tiers.host import HostTier, PeerTier
from services.worker.kv.tiers.records import CRC, Checksums, LayerPools, Records
from services.worker.kv.transfers import TransferEngine
from shared.errors import ConfigError
from shared.log import canonical, get_logger

_log = get_logger("worker.kv")
_MEGA = 1024 * 1024


@runtime_checkable
class CacheableEngine(Protocol):
    """An engine whose KV can be copied out and in."""

    @property
    def kv_blocks(self) -> int: ...

    @property
    def block_tokens(self) -> int: ...

    @property
    def pools(self) -> LayerPools: ...

    @property
    def fingerprint(self) -> bytes:
        """16 bytes that must agree for KV to be exchanged."""
        ...

    def make_pool(self) -> BlockPool:
        """Return the pool of its blocks; called once."""
        ...

    def records(self) -> Records:
        """Return its blocks as rows of bytes. Raises ConfigError when they have no fixed place."""
        ...


@dataclass(frozen=True, slots=True)
class KvStore:
    """The cache, which the engine's thread owns, and its tiers."""

    cache: PrefixCache
    fingerprint: bytes
    record_bytes: int
    mover: TierMover
    host: HostTier
    disk: DiskTier | None
    peers: PeerTier | None
    sums: Checksums
    auditor: SampledAudit | None
    transfers: TransferEngine

    def forget_unused(self) -> int:
        """Drop blocks that are not in use; return their number. On the engine's thread."""
        blocks, slots = self.cache.forget_unused()
        if self.disk is not None:
            self.disk.clear(slots)
        canonical(_log, "prefix cache emptied", forgotten_blocks=blocks)
        return blocks

    def close(self, deadline_s: float, flush_s: float = 0.0) -> bool:
        """End the copying threads, and write blocks to disk for up to `flush_s`; after the engine's thread
        has ended. False: a thread did not end, and the file is left open."""
        if not self.transfers.halt(deadline_s):
            return False
        if self.disk is not None and flush_s > 0:
            self._flush(flush_s)
        self.mover.close()
        return True

    def _flush(self, flush_s: float) -> None:
        disk, began_s = self.disk, monotonic()
        assert disk is not None
        self.transfers.settle()
        until_s, faults = began_s + flush_s, disk.counts["write_errors"]
        written, left = self.cache.flush(
            lambda node, tier, source: self.mover.write_now(node, tier, source, until_s),
            lambda: monotonic() < until_s and disk.counts["write_errors"] == faults,
        )
        took_s = round(monotonic() - began_s, 3)
        canonical(_log, "prefix cache flushed", written_blocks=written, left_blocks=left, took_s=took_s)


def open_store(
    config: PrefixCacheConfig,
    engine: CacheableEngine,
    instance: str,
    transfers: TransferEngine,
    sums: Checksums = CRC,
    *,
    host_blocks: int = 0,
) -> KvStore:
    """Return the cache of `engine`'s blocks and up to `host_blocks` on the host, with those that an earlier
    run of `instance` left on disk. Without a usable disk it warns. Raises ConfigError for an unknown order,
    and for a host tier larger than the engine's host memory for it."""
    records = engine.records()
    size = records.record_bytes
    disk_blocks = config.disk_mb * _MEGA // size
    disk = None
    if disk_blocks:
        path = Path(config.disk_path) / f"{instance}.kv"
        disk = open_disk(path, Geometry(engine.fingerprint, size, disk_blocks), sums)
    peer_blocks = config.peer_slots(size)
    peers = PeerTier(engine.fingerprint, sums) if peer_blocks else None
    bytes_per_s = {Tier.HOST: config.host_bytes_per_s, Tier.DISK: config.disk_bytes_per_s}
    host = HostTier(host_blocks, size, engine.fingerprint, sums, records.host_rows)
    mover = TierMover(transfers, records, host, disk, bytes_per_s, peers)
    kept_blocks = int(host_blocks * config.swap_share)
    shadow_blocks = int(host_blocks * config.shadow_share)
    tiers = Tiers(
        host_blocks, disk_blocks if disk else 0, config.eviction, kept_blocks, shadow_blocks, peer_blocks
    )
    gate = CostGate()
    gate.profile(Tier.HOST, mover.profile(engine.kv_blocks))
    records.give_back()
    pool = engine.make_pool()
    residency = pool.residency if isinstance(pool, GrownPool) else None
    if residency is not None and residency.cache_rows < host_blocks:
        raise ConfigError(
            f"the engine has host memory for {residency.cache_rows} blocks of a prefix cache, not "
            f"{host_blocks}",
            param="host_memory",
        )
    cache = PrefixCache(pool, tiers, mover, gate)
    if residency is not None:
        residency.on_moved = cache.on_moved_block
        residency.is_intact = lambda block: cache.verify(block, host.is_intact)
    restored = 0 if disk is None else cache.restore(disk.stored())
    canonical(
        _log,
        "prefix cache open",
        device_blocks=engine.kv_blocks,
        host_blocks=host_blocks,
        disk_blocks=tiers.disk_blocks,
        peer_blocks=peer_blocks,
        block_bytes=size,
        restored_blocks=restored,
    )
    rate = config.audit_rate
    auditor = SampledAudit(engine.records(), engine.pools, rate) if rate else None
    return KvStore(cache, engine.fingerprint, size, mover, host, disk, peers, sums, auditor, transfers)
