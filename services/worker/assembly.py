"""Factories for the parts of a worker that depend on its engine: the engine, prefix cache, pool and core."""

import os
import sys
from typing import TYPE_CHECKING, Any

import psutil

from services.worker.config import WorkerConfig
from services.worker.core.drafts import Drafts
from services.worker.core.prefixes import Prefixes
from services.worker.core.reports import Identity, SpeedMeter
from services.worker.core.sequences import SequenceLimits, SequenceTable
from services.worker.core.steps import StepCore
from services.worker.engine.contract import AttendingEngine, Engine, SharingEngine
from services.worker.engine.native.sums import checksums
from services.worker.engine.progress import LoadProgress
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.core.borrowed_pool import ExtendedPool, OwnPool, Pool
from services.worker.kv.store import CacheableEngine, KvStore, open_store
from services.worker.kv.tiers.records import CRC
from services.worker.kv.transfers import TransferEngine
from shared.bus import Bus
from shared.errors import ConfigError

if TYPE_CHECKING:
    from services.worker.pie.blocks import BlockPie

_SIMULATED_HOST_SHARE = 4
"""Largest host tier of a simulated engine, as a multiple of its KV blocks."""
_END_RETENTION_S = 60.0
"""Seconds for which an end that no gateway acknowledges is kept."""
_SIMULATED_KV_BLOCKS = 1024
"""Number of KV blocks of a simulated engine if `kv_blocks` is not set."""


def open_cache(
    config: WorkerConfig, engine: Engine, instance: str, transfers: TransferEngine
) -> KvStore | None:
    """Return the prefix cache, or None if it is disabled or the engine's KV cannot be copied."""
    settings, attending = config.prefix_cache, engine if isinstance(engine, AttendingEngine) else None
    if not settings.enabled or not isinstance(engine, CacheableEngine):
        return None
    host_blocks = config.cache_blocks(engine.records().record_bytes)
    is_simulated = config.engine == "simulated"
    if is_simulated and not config.host_memory.blocks:  # Its blocks are tiny: `mb` would hold millions.
        host_blocks = min(host_blocks, _SIMULATED_HOST_SHARE * engine.kv_blocks)
    sums = CRC if is_simulated else checksums()
    store = open_store(settings, engine, instance, transfers, sums, host_blocks=host_blocks)
    if attending is not None and attending.pie is not None:
        cache = store.cache
        attending.pie.watch(
            lambda: cache.total_blocks - cache.free_blocks - cache.evictable_blocks, cache.shed
        )
    return store


def costs_of(engine: SharingEngine, pie: "BlockPie | None") -> dict[str, Any]:
    """Return the heartbeat's measured costs of remote blocks and of layers swapped to the host.
    `expand_stall_s` is the stall of a decode step per swapped layer, in seconds."""
    stall_s: float | None = None
    swapped_layers = 0
    if pie is not None:
        expansion, meter = pie.expansion(), pie.meter
        swapped_layers = expansion.fifo_layers
        if swapped_layers and meter.step_s:
            stall_s = expansion.stall_share * meter.step_s / swapped_layers
    return {
        "remote_block_s": engine.remote.block_s,
        "expand_stall_s": stall_s,
        "swapped_layers": swapped_layers,
    }


def pool_of(engine: Engine, store: KvStore | None) -> OwnPool:
    """Return the pool of the engine's own blocks."""
    if store is not None:
        return store.cache
    if isinstance(engine, SharingEngine):
        return engine.make_pool()
    return BlockPool(engine.kv_blocks, engine.block_tokens)


def core_of(
    bus: Bus, config: WorkerConfig, engine: Engine, host: str, pool: Pool, prefixes: Prefixes | None
) -> StepCore:
    """Return the core. Without a fingerprint, the worker's KV cannot be exchanged."""
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
        fingerprint=engine.fingerprint if isinstance(engine, CacheableEngine) else b"",
        carries=engine.carries,
        adapters=tuple(config.vllm.adapters),
    )
    limits = SequenceLimits(
        max_context_tokens=engine.max_positions if isinstance(pool, ExtendedPool) else own_tokens,
        vocabulary=engine.vocabulary,
        end_retention_s=_END_RETENTION_S,
        gateway_timeout_s=config.gateway_timeout_s,
        adapters=identity.adapters,
    )
    worker = (identity.worker_id, identity.incarnation)
    drafts = Drafts(config.lookup_tokens) if config.lookup_tokens else None
    table, speed = SequenceTable(pool, limits, prefixes, worker), SpeedMeter(engine.prefill_tokens_per_s)
    return StepCore(identity, table, speed, drafts)


def on_its_gpu(config: WorkerConfig) -> WorkerConfig:
    """Return the settings for a process that sees GPU `cuda:N` alone, as `cuda`; call it before CUDA is used.

    Kernels, streams and graphs are launched on the current device, which is the first in every new thread."""
    number = config.device.partition(":")[2]
    if not number:
        return config
    visible = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    if visible and int(number) >= len(visible):
        text = f"device {config.device}: CUDA_VISIBLE_DEVICES lists {len(visible)} GPUs, counted from 0"
        raise ConfigError(text, param="device")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[int(number)] if visible else number
    return config.model_copy(update={"device": "cuda"})


def make_engine(config: WorkerConfig, progress: LoadProgress | None = None) -> Engine:
    """Return the configured engine, warmed up and profiled. Raises ConfigError."""
    progress = progress or LoadProgress()
    if config.engine == "simulated":
        from services.worker.engine.simulated import SimulatedEngine

        kv_blocks = config.kv_blocks or _SIMULATED_KV_BLOCKS
        engine = SimulatedEngine.of(config.model, kv_blocks, config.block_tokens, config.simulated)
        engine.overlaps = not config.lookup_tokens
        return engine
    if config.engine == "vllm":
        os.environ["OMP_NUM_THREADS"] = str(config.threads)  # torch reads it once, on import
        from services.worker.building_vllm import build_vllm

        progress.at("vLLM loads the model")
        return build_vllm(config)
    progress.at("imports torch")
    from services.worker.building import build  # importing torch takes seconds

    return build(config, progress)


def memory_mb(device: str) -> dict[str, int]:
    """Return this process's resident memory, and free and total memory of host and GPU, in MiB."""
    host, torch = psutil.virtual_memory(), sys.modules.get("torch")
    found = {"resident_mb": psutil.Process().memory_info().rss, "host_free_mb": host.available}
    found["host_mb"] = host.total
    if device.startswith("cuda") and torch is not None:
        found["device_free_mb"], found["device_mb"] = torch.cuda.mem_get_info(device)
    return {name: size >> 20 for name, size in found.items()}
