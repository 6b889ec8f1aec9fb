"""Factories for the parts of a worker: its engine, prefix cache, core, transfers and registry."""

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
from services.worker.engine.progress import LoadProgress
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
"""Largest host tier of a simulated engine, as a multiple of its KV blocks."""
_SIMULATED_KV_BLOCKS = 1024
"""Number of KV blocks of a simulated engine if `kv_blocks` is not set."""


def open_cache(
    config: WorkerConfig, engine: Engine, instance: str, transfers: TransferEngine
) -> KvStore | None:
    """Return the prefix cache, or None if it is disabled or the engine's KV cannot be copied."""
    attending = engine if isinstance(engine, AttendingEngine) else None
    if not config.prefix_cache.enabled or not isinstance(engine, CacheableEngine):
        return None
    settings = config.prefix_cache
    if config.engine == "simulated":  # Its blocks are tiny: host_mb would hold millions.
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
    """Return the digest that two workers must share to exchange KV; empty if the KV cannot be copied."""
    return engine.fingerprint if isinstance(engine, CacheableEngine) else b""


def prefixes_of(store: KvStore | None, config: WorkerConfig) -> Prefixes | None:
    if store is None:
        return None
    settings = config.prefix_cache
    return Prefixes(store.cache, store.fingerprint, settings.lookahead_sequences, store.auditor)


def expansion_of(engine: Engine) -> dict[str, float]:
    """Return Pie's figures for the status; empty without Pie."""
    if not isinstance(engine, AttendingEngine) or engine.pie is None:
        return {}
    return engine.pie.expansion().details()


def costs_of(engine: Engine) -> dict[str, Any]:
    """Return the heartbeat's measured costs of remote blocks and of layers swapped to the host.

    `expand_stall_s` is the stall of a decode step per swapped layer, in seconds.
    """
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
        "remote_block_s": engine.remote.block_s,
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
    """Return the KV transfers between workers, or None if they or the prefix cache are disabled."""
    if store is None or not config.transfer.enabled or not isinstance(engine, CacheableEngine):
        return None
    return Transfers(bus, config.transfer, engine, store, registry, runner, clock, reader)


def transfer_engine_of(engine: Engine, wake: Callable[[], None]) -> TransferEngine:
    """Return the engine that runs all KV copies of a worker; see `TransferEngine` for `wake`."""
    if not isinstance(engine, AttendingEngine):
        return TransferEngine(wake)
    attention = engine.attention
    return TransferEngine(wake, is_reading=lambda: attention.is_reading)


def between_steps(engine: Engine, transfers: TransferEngine, prefixes: Prefixes | None) -> Callable[[], None]:
    """Return the work to do between two steps and while idle.

    The engine is checked for Pie once, because `isinstance` with a protocol takes 20 µs in Python 3.11.
    """
    pie = engine.pie if isinstance(engine, AttendingEngine) else None

    def work_ahead() -> None:
        transfers.settle()
        if pie is not None:
            pie.rest()
        if prefixes is not None:
            prefixes.work_ahead()

    return work_ahead


def remote_seconds(engine: Engine) -> Callable[[], float]:
    """Return a function that returns the total seconds spent on attention over remote blocks."""
    if not isinstance(engine, SharingEngine):
        return lambda: 0.0
    return lambda: engine.remote.total_s


def pool_of(engine: Engine, store: KvStore | None) -> BlockPool | PrefixCache:
    """Return the pool of the engine's own blocks."""
    if store is not None:
        return store.cache
    if isinstance(engine, SharingEngine):
        return engine.make_pool()
    return BlockPool(engine.kv_blocks, engine.block_tokens)


def registry_of(bus: Bus, config: WorkerConfig, clock: Clock) -> Registry:
    """Return the registry of neighbours. Raises ConfigError for an unavailable transport."""
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


def make_engine(config: WorkerConfig, progress: LoadProgress | None = None) -> Engine:
    """Return the configured engine, warmed up and profiled. Raises ConfigError."""
    progress = progress or LoadProgress()
    if config.engine == "simulated":
        from services.worker.engine.simulated import SimulatedEngine

        kv_blocks = config.kv_blocks or _SIMULATED_KV_BLOCKS
        return SimulatedEngine.of(config.model, kv_blocks, config.block_tokens, config.simulated)
    if config.engine == "vllm":
        os.environ["OMP_NUM_THREADS"] = str(config.threads)  # torch reads it once, on import
        from services.worker.building_vllm import build_vllm

        progress.at("vLLM loads the model")
        return build_vllm(config)
    progress.at("imports torch")
    from services.worker.building import build  # importing torch takes seconds

    return build(config, progress)


def make_bound_engine(config: WorkerConfig, progress: LoadProgress) -> Engine:
    """`make_engine` on the engine's cores; compute threads that it starts inherit them."""
    bind_to(config.engine_cores, "engine_cores")
    return make_engine(config, progress)
