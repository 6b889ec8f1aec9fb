"""What a worker is put together from: the engine, warm; its prefix cache; the core that decides.

Settings in, parts out; nothing here runs, and nothing but the worker's name comes from the bus.
"""

import os
import socket
from collections.abc import Callable
from typing import Any

from services.worker.config import WorkerConfig
from services.worker.core.prefixes import Prefixes
from services.worker.core.reports import Identity, SpeedMeter
from services.worker.core.sequences import SequenceLimits, SequenceTable
from services.worker.core.steps import StepCore
from services.worker.cores import bind_to
from services.worker.engine.contract import AttendingEngine, Engine, SharingEngine
from services.worker.engine.native.sums import checksums
from services.worker.engine.progress import Progress
from services.worker.engine_thread import Runner
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.core.borrowed_pool import ExtendedPool, Pool
from services.worker.kv.core.prefix_cache import PrefixCache
from services.worker.kv.store import CacheableEngine, KvStore, open_store
from services.worker.kv.tiers.checksums import CRC
from services.worker.kv.transfers import TransferEngine
from services.worker.peers.engine_calls import BorrowedReader
from services.worker.peers.migration.service import Transfers
from services.worker.peers.registry import Registry
from services.worker.peers.transport.settings import make_transports
from shared.bus import Bus
from shared.clock import Clock

_SIMULATED_HOST_SHARE = 4
"""The host tier of a simulated engine, in times its KV."""
_SIMULATED_KV_BLOCKS = 1024
"""Where no setting says how many: it has no memory to take a part of."""


def open_cache(
    config: WorkerConfig, engine: Engine, instance: str, transfers: TransferEngine
) -> KvStore | None:
    """None where it is switched off, or the engine's KV cannot be copied."""
    attending = engine if isinstance(engine, AttendingEngine) else None
    if not config.prefix_cache.enabled or not isinstance(engine, CacheableEngine):
        return None
    settings = config.prefix_cache
    if config.engine == "simulated":  # Its blocks are so small that host_mb would hold millions.
        most = _SIMULATED_HOST_SHARE * engine.kv_blocks
        host_blocks = settings.host_blocks or (most if settings.host_mb else 0)
        settings = settings.model_copy(update={"host_blocks": host_blocks})
    sums = CRC if config.engine == "simulated" else checksums()
    store = open_store(settings, engine, instance, transfers, sums)
    if attending is not None and attending.pie is not None:
        cache = store.cache
        attending.pie.watch(
            lambda: cache.total_blocks - cache.free_blocks - cache.evictable_blocks, cache.shed
        )
    return store


def fingerprint_of(engine: Engine) -> bytes:
    """What must agree for KV to be exchanged, with a prefix cache or without; empty where nobody else could
    read this engine's."""
    return engine.fingerprint if isinstance(engine, CacheableEngine) else b""


def prefixes_of(store: KvStore | None, config: WorkerConfig) -> Prefixes | None:
    if store is None:
        return None
    settings = config.prefix_cache
    return Prefixes(store.cache, store.fingerprint, settings.lookahead_sequences, store.auditor)


def expansion_of(engine: Engine) -> dict[str, float]:
    """What Pie is at, if it is on."""
    if not isinstance(engine, AttendingEngine) or engine.pie is None:
        return {}
    return engine.pie.expansion().details()


def costs_of(engine: Engine) -> dict[str, Any]:
    """Of the heartbeat: what the engine measured of blocks that lie elsewhere, and of blocks on the host."""
    if not isinstance(engine, SharingEngine):
        return {}
    stall_s: float | None = None
    swapped_layers = 0
    pie = engine.pie if isinstance(engine, AttendingEngine) else None
    if pie is not None:
        expansion, meter = pie.expansion(), pie.meter
        swapped_layers = expansion.fifo_layers
        if expansion.fifo_layers and meter.step_s:
            stall_s = expansion.stall_share * meter.step_s / expansion.fifo_layers
    return {
        "remote_block_s": engine.remote_block_s,
        "expand_stall_s": stall_s,
        "swapped_layers": swapped_layers,
    }


def transfers_of(
    bus: Bus,
    config: WorkerConfig,
    engine: Engine,
    store: KvStore | None,
    registry: Registry,
    runner: Runner,
    clock: Clock,
    reader: BorrowedReader | None,
) -> Transfers | None:
    """None where there is no prefix cache to fetch into, or it is switched off."""
    if store is None or not config.transfer.enabled or not isinstance(engine, CacheableEngine):
        return None
    return Transfers(bus, config.transfer, engine, store, registry, runner, clock, reader)


def transfer_engine_of(engine: Engine, wake: Callable[[], None]) -> TransferEngine:
    """What carries all copies of one worker's KV; `wake` as there."""
    if not isinstance(engine, AttendingEngine):
        return TransferEngine(wake)
    attention = engine.attention
    return TransferEngine(wake, is_reading=lambda: attention.is_reading)


def between_steps(engine: Engine, transfers: TransferEngine, prefixes: Prefixes | None) -> Callable[[], None]:
    """What is done between two steps, and while there are none. What the engine can do is looked at once:
    to ask a protocol takes 20 µs in Python 3.11."""
    pie = engine.pie if isinstance(engine, AttendingEngine) else None

    def work_ahead() -> None:
        transfers.settle()
        if pie is not None:
            pie.rest()
        if prefixes is not None:
            prefixes.work_ahead()

    return work_ahead


def remote_seconds(engine: Engine) -> Callable[[], float]:
    """What attention over other workers' blocks has taken so far; asked with each step."""
    if not isinstance(engine, SharingEngine):
        return lambda: 0.0
    return lambda: engine.remote_total_s


def pool_of(engine: Engine, store: KvStore | None) -> BlockPool | PrefixCache:
    """The engine's own blocks."""
    if store is not None:
        return store.cache
    if isinstance(engine, SharingEngine):
        return engine.make_pool()
    return BlockPool(engine.kv_blocks, engine.block_tokens)


def registry_of(bus: Bus, config: WorkerConfig, clock: Clock) -> Registry:
    """Raises ConfigError for a transport that is not there."""
    transports = make_transports(config.bulk)
    return Registry(bus, config.host or socket.gethostname(), transports, config.bulk.ticket_s, clock)


def core_of(
    bus: Bus, config: WorkerConfig, engine: Engine, host: str, pool: Pool, prefixes: Prefixes | None
) -> StepCore:
    pie = engine.pie if isinstance(engine, AttendingEngine) else None
    most_blocks = engine.kv_blocks if pie is None else pie.most_blocks
    own_tokens = min(engine.max_positions, most_blocks * engine.block_tokens)
    identity = Identity(
        worker_id=bus.instance,
        incarnation=bus.incarnation,
        model=config.served_name,
        max_context_tokens=own_tokens,
        host=host,
        weights=engine.weights,
        fingerprint=fingerprint_of(engine),
    )
    limits = SequenceLimits(
        max_context_tokens=engine.max_positions if isinstance(pool, ExtendedPool) else own_tokens,
        vocabulary=engine.vocabulary,
        end_retention_s=config.end_retention_s,
        gateway_timeout_s=config.gateway_timeout_s,
    )
    worker = (identity.worker_id, identity.incarnation)
    return StepCore(
        identity, SequenceTable(pool, limits, prefixes, worker), SpeedMeter(engine.prefill_tokens_per_s)
    )


def make_engine(config: WorkerConfig, progress: Progress | None = None) -> Engine:
    """The configured engine, warm and timed: the first request finds nothing left to set up.

    Raises ConfigError.
    """
    progress = progress or Progress()
    if config.engine == "simulated":
        from services.worker.engine.simulated import SimulatedEngine

        kv_blocks = config.kv_blocks or _SIMULATED_KV_BLOCKS
        return SimulatedEngine.of(config.model, kv_blocks, config.block_tokens, config.simulated)
    if config.engine == "vllm":
        os.environ["OMP_NUM_THREADS"] = str(config.threads)  # read when torch is loaded, and never again
        from services.worker.building_vllm import build_vllm

        progress.at("vLLM loads the model")
        return build_vllm(config)
    progress.at("imports torch")
    from services.worker.building import build  # torch takes seconds

    return build(config, progress)


def make_bound_engine(config: WorkerConfig, progress: Progress) -> Engine:
    """On the engine's cores, so that compute threads started on the way are there, too."""
    bind_to(config.engine_cores, "engine_cores")
    return make_engine(config, progress)
