"""The native engine, from a worker's settings."""

import contextlib
import gc
import itertools
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from services.worker.config import WorkerConfig
from services.worker.engine.checkpoint import checkpoint_digest, stored_dtype
from services.worker.engine.engine import TorchEngine, decode_cost, prefill_tokens_per_s, warm_up
from services.worker.engine.fetching import fetch
from services.worker.engine.grammar_masks import GrammarMasks
from services.worker.engine.loading import load
from services.worker.engine.progress import Progress
from services.worker.peers.attention.staging import HALVES
from services.worker.peers.lending.core.settings import LendingConfig
from services.worker.pie.core.sizes import most_fifo_layers, spare_blocks
from shared.errors import ConfigError
from shared.grammars import Grammars
from shared.log import canonical, get_logger
from shared.tokenizer_files import load_tokenizer

_log = get_logger("worker.building")
_CPU_FRACTION, _GPU_FRACTION = 0.05, 0.85
"""Others live on a CPU's memory, too: further workers, and the page cache that their weights are in."""
_STEP_BLOCKS = 64
_CONTROL_GROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)
"""What it may have and has, of version 2 and 1, as seen inside a container."""


def build(config: WorkerConfig, progress: Progress | None = None) -> TorchEngine:
    """The engine of a model, warm and timed: the first request finds nothing left to set up.

    Raises ConfigError.
    """
    torch.set_num_threads(config.threads)
    dtype = stored_dtype(config.model) if config.dtype == "auto" else config.dtype
    progress = progress or Progress()
    fetch(config.model, progress)
    progress.at("reads the weights")
    model = load(config.model, dtype=dtype, device=config.device, progress=progress)
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
        host_blocks=config.prefix_cache.host_slots(block_bytes),
        grammars=GrammarMasks(lambda: Grammars(load_tokenizer(config.model), model.vocabulary)),
        states_every=config.states_every,
    )
    engine.weights = checkpoint_digest(config.model, str(model.dtype))  # the same for other kinds of engines
    progress.at("warms up")
    warm_up(engine)
    engine.prefill_tokens_per_s = prefill_tokens_per_s(engine, kv_blocks)
    if engine.pie is not None and config.pie.enabled == "auto":
        cost = engine.pie.decode_cost = decode_cost(engine, kv_blocks)
        if cost is not None:
            told = {"fixed_ms": round(1e3 * cost.fixed_s, 3), "row_ms": round(1e3 * cost.row_s, 4)}
            canonical(_log, "decoding step timed", **told)
    gc.collect()
    gc.freeze()  # What is there now stays: no collection during a step walks through it.
    return engine


def kv_capacity(config: WorkerConfig, block_bytes: int, free: Callable[[], int]) -> int:
    """In blocks: as the settings say, or a part of what is `free`, in steps of 64."""
    if config.kv_bytes:
        return config.kv_bytes // block_bytes
    if config.kv_blocks:
        return config.kv_blocks
    blocks = int(free() * kv_fraction(config)) // block_bytes
    return blocks // _STEP_BLOCKS * _STEP_BLOCKS if blocks > _STEP_BLOCKS else blocks


def kv_fraction(config: WorkerConfig) -> float:
    """Of what is free, where neither blocks nor bytes are set."""
    return config.kv_memory_fraction or (_CPU_FRACTION if config.device == "cpu" else _GPU_FRACTION)


def free_bytes(device: str) -> int:
    """Of a GPU, or of this machine's memory as far as this process' control group may have it."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available)
    for limit, used in _CONTROL_GROUPS:
        with contextlib.suppress(OSError, ValueError):  # Not this version; or "max", which is no number.
            available = min(available, int(limit.read_text()) - int(used.read_text()))
    return max(0, available)


def least_blocks(config: WorkerConfig, layers: int) -> int:
    """Blocks with which any request that fits can be computed: what is staged, what Pie's highest level makes
    buffers of, and the two that a step writes to at the border of a block."""
    highest = most_fifo_layers(layers) if config.pie.enabled is not False else 0
    own = next(count for count in itertools.count(2) if count - spare_blocks(layers, highest, count) >= 2)
    return own + staged_blocks(config.lending, layers)


def staged_blocks(config: LendingConfig, layers: int) -> int:
    """What the stagings of all creditors take, in the worker's own KV blocks."""
    staged = config.most_creditors * HALVES * config.staging_blocks if config.borrow is True else 0
    return -(-staged // layers)
