"""Builds the vLLM engine from a worker's settings."""

import contextlib
import gc
from importlib.util import find_spec
from pathlib import Path

from services.worker.building import free_bytes, kv_fraction
from services.worker.config import WorkerConfig
from services.worker.engine.checkpoint import checkpoint_digest
from services.worker.engine.engine import prefill_tokens_per_s, warm_up
from services.worker.engine.grammar_masks import GrammarMasks
from services.worker.engine.vllm.engine import VllmEngine
from services.worker.engine.vllm.runner import VllmRunner
from shared.errors import ConfigError
from shared.grammars import Grammars
from shared.log import canonical, get_logger
from shared.model_files import HubId, check_model, source_of
from shared.tokenizer_files import load_tokenizer

_log = get_logger("worker.vllm")


def build_vllm(config: WorkerConfig) -> VllmEngine:
    """Return the vLLM engine, warmed up and profiled. Raises ConfigError if vLLM is missing, has another
    version, or cannot run the model."""
    if find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not in this Python: run `make setup-vllm`, and start this worker with "
            ".venv-vllm/bin/python",
            param="engine",
        )
    with contextlib.suppress(OSError):  # sets the name that `ps` shows, on Linux
        Path("/proc/self/comm").write_text(config.instance)
    check_model(config.model)
    source = source_of(config.model)
    runner = VllmRunner(
        source.name if isinstance(source, HubId) else str(source),
        revision=source.revision if isinstance(source, HubId) else None,
        device=config.device,
        dtype=config.dtype,
        block_tokens=config.block_tokens,
        kv_blocks=0 if config.kv_bytes else config.kv_blocks,
        kv_bytes=kv_bytes_of(config),
        memory_fraction=kv_fraction(config),
        settings=config.vllm,
    )
    engine = VllmEngine(
        runner,
        weights=checkpoint_digest(config.model, str(runner.dtype), config.vllm.adapters),
        block_tokens=config.block_tokens,
        max_rows=config.vllm.max_rows,
        max_step_tokens=config.vllm.max_step_tokens,
        grammars=GrammarMasks(lambda: Grammars(load_tokenizer(config.model), runner.vocabulary)),
    )
    warm_up(engine)
    engine.prefill_tokens_per_s = prefill_tokens_per_s(engine, engine.kv_blocks)
    if config.device != "cpu":
        engine.carries = config.vllm.max_rows, config.vllm.max_step_tokens
    canonical(
        _log,
        "vLLM is warm",
        version=runner.version,
        model_runner=runner.kind,
        layout=runner.layout,
        dtype=str(runner.dtype),
        kv_blocks=engine.kv_blocks,
        prefill_tokens_per_s=round(engine.prefill_tokens_per_s),
    )
    gc.collect()
    gc.freeze()  # Keeps collections during a step short.
    return engine


def kv_bytes_of(config: WorkerConfig) -> int:
    """Return the bytes for KV; 0: `kv_blocks` sets the size, or vLLM measures a GPU's memory itself."""
    if config.kv_bytes or config.kv_blocks or config.device != "cpu":
        return config.kv_bytes
    return int(free_bytes("cpu") * kv_fraction(config))
