"""Builds the native engine from a worker's settings."""

import contextlib
import gc
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from services.worker.config import WorkerConfig
from services.worker.core.settings import LendingConfig
from services.worker.engine.checkpoint import checkpoint_digest, stored_dtype
from services.worker.engine.engine import TorchEngine, carried, decode_cost, prefill_tokens_per_s, warm_up
from services.worker.engine.grammar_masks import GrammarMasks
from services.worker.engine.loading import KV_DTYPES, fetch, load
from services.worker.engine.progress import LoadProgress
from services.worker.kv.tiers.records import DONT_NEED, advise
from services.worker.peers.attention.shares import HALVES
from services.worker.pie.core.sizes import most_fifo_layers, spare_blocks
from shared.bus.runtime import trim_heap
from shared.errors import ConfigError
from shared.grammars import Grammars
from shared.log import canonical, get_logger
from shared.tokenizer_files import load_tokenizer

_log = get_logger("worker.building")
_CPU_FRACTION, _GPU_FRACTION = 0.05, 0.85
"""Share of free memory for KV. On a CPU other workers and the page cache need memory, too."""
_STEP_BLOCKS = 64
_CONTROL_GROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)
"""Files with the memory limit and usage of control groups v2 and v1, as seen inside a container."""


def build(config: WorkerConfig, progress: LoadProgress | None = None) -> TorchEngine:
    """Return the native engine of a model, warmed up and profiled. Raises ConfigError."""
    torch.set_num_threads(config.threads)
    dtype = stored_dtype(config.model) if config.dtype == "auto" else config.dtype
    progress, memory = progress or LoadProgress(), config.host_memory
    fetch(config.model, progress)
    progress.at("reads the weights")
    model = load(
        config.model,
        dtype=dtype,
        device=config.device,
        weights=config.weights,
        attention=config.attention,
        progress=progress,
    )
    if config.kv_dtype != "auto":
        model = replace(model, kv_dtype=KV_DTYPES[config.kv_dtype])
    block_bytes = model.block_bytes(config.block_tokens)
    kv_blocks = kv_capacity(config, block_bytes, lambda: free_bytes(config.device))
    least = least_blocks(config, len(model.layers))
    if kv_blocks < least:
        raise ConfigError(
            f"{kv_blocks} blocks of KV are too few: a request to this model needs {least}; set "
            f"worker.kv_blocks={least} or more, or kv_bytes={least * block_bytes}, or raise "
            "kv_memory_fraction",
            param="kv_blocks",
        )
    kv_blocks -= staged_blocks(config.lending, len(model.layers))
    progress.at("compiles and sets up the engine")
    engine = TorchEngine(
        model,
        kv_blocks=kv_blocks,
        block_tokens=config.block_tokens,
        attention=config.attention,
        threads=config.threads,
        release=True,
        pie=config.pie,
        pie_bytes=memory.bytes_of(memory.pie_share, block_bytes),
        cache_blocks=config.cache_blocks(block_bytes),
        grammars=GrammarMasks(lambda: Grammars(load_tokenizer(config.model), model.vocabulary)),
        states_every=config.states_every,
    )
    engine.weights = checkpoint_digest(config.model, str(model.dtype))  # equal for all kinds of engines
    progress.at("warms up")
    warm_up(engine)
    engine.prefill_tokens_per_s = prefill_tokens_per_s(engine, kv_blocks)
    if engine.pie is not None and config.pie.enabled == "auto":
        cost = engine.pie.decode_cost = decode_cost(engine, kv_blocks)
        if cost is not None:
            told = {"fixed_ms": round(1e3 * cost.fixed_s, 3), "row_ms": round(1e3 * cost.row_s, 4)}
            canonical(_log, "decoding step timed", **told)
    if engine.device_type == "cpu":
        _give_back(engine)
    else:
        engine.carries = carried(engine, kv_blocks)
        sequences, step_tokens = engine.carries
        canonical(_log, "batches sized by the GPU", sequences=sequences, step_tokens=step_tokens)
    gc.collect()
    gc.freeze()  # Keeps collections during a step short.
    return engine


def _give_back(engine: TorchEngine) -> None:
    """Return to the system what loading and warming up have left in the heap and in the pools."""
    for part in itertools.chain.from_iterable(engine.pools):
        advise(part.view(-1).view(torch.uint8).numpy(), DONT_NEED)
    trim_heap()


def kv_capacity(config: WorkerConfig, block_bytes: int, free: Callable[[], int]) -> int:
    """Return the number of KV blocks: as set, or a share of the `free` bytes, in steps of 64."""
    if config.kv_bytes:
        return config.kv_bytes // block_bytes
    if config.kv_blocks:
        return config.kv_blocks
    blocks = int(free() * kv_fraction(config)) // block_bytes
    return blocks // _STEP_BLOCKS * _STEP_BLOCKS if blocks > _STEP_BLOCKS else blocks


def kv_fraction(config: WorkerConfig) -> float:
    """Return the share of free memory for KV if neither blocks nor bytes are set."""
    return config.kv_memory_fraction or (_CPU_FRACTION if config.device == "cpu" else _GPU_FRACTION)


def free_bytes(device: str) -> int:
    """Return free bytes of a GPU, or of host memory within the limit of the process's control group."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available)
    for limit, used in _CONTROL_GROUPS:
        with contextlib.suppress(OSError, ValueError):  # another version, or a limit of "max"
            available = min(available, int(limit.read_text()) - int(used.read_text()))
    return max(0, available)


def least_blocks(config: WorkerConfig, layers: int) -> int:
    """Return the fewest KV blocks with which the engine can run. They are the staging blocks, the buffers of
    Pie's highest level, and two blocks that one row writes to."""
    highest = most_fifo_layers(layers) if config.pie.enabled is not False else 0
    own = next(count for count in itertools.count(2) if count - spare_blocks(layers, highest, count) >= 2)
    return own + staged_blocks(config.lending, layers)


def staged_blocks(config: LendingConfig, layers: int) -> int:
    """Return the size of the staging buffers of all creditors, in KV blocks."""
    staged = config.most_creditors * HALVES * config.staging_blocks if config.borrow is True else 0
    return -(-staged // layers)
