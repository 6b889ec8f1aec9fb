"""The native engine, from a worker's settings."""

import gc

import torch

from services.worker.config import WorkerConfig
from services.worker.engine.checkpoint import checkpoint_digest, stored_dtype
from services.worker.engine.engine import TorchEngine, prefill_tokens_per_s, warm_up
from services.worker.engine.grammar_masks import GrammarMasks
from services.worker.engine.loading import load
from services.worker.peers.attention.staging import HALVES
from services.worker.peers.lending.core.settings import LendingConfig
from shared.errors import ConfigError
from shared.grammars import Grammars
from shared.tokenizer_files import load_tokenizer


def build(config: WorkerConfig) -> TorchEngine:
    """The engine of a model, warm and timed: the first request finds nothing left to set up.

    Raises ConfigError.
    """
    torch.set_num_threads(config.threads)
    dtype = stored_dtype(config.model) if config.dtype == "auto" else config.dtype
    model = load(config.model, dtype=dtype, device=config.device)
    block_bytes = model.block_bytes(config.block_tokens)
    kv_blocks = config.kv_bytes // block_bytes if config.kv_bytes else config.kv_blocks
    kv_blocks -= staged_blocks(config.lending, len(model.layers))
    if kv_blocks < 1:
        raise ConfigError(f"kv_bytes holds no block: one takes {block_bytes} bytes", param="kv_bytes")
    engine = TorchEngine(
        model,
        kv_blocks=kv_blocks,
        block_tokens=config.block_tokens,
        attention=config.attention,
        threads=config.threads,
        release=True,
        pie=config.pie,
        grammars=GrammarMasks(lambda: Grammars(load_tokenizer(config.model), model.vocabulary)),
        states_every=config.states_every,
    )
    engine.weights = checkpoint_digest(config.model, str(model.dtype))  # the same for other kinds of engines
    warm_up(engine)
    engine.prefill_tokens_per_s = prefill_tokens_per_s(engine, kv_blocks)
    gc.collect()
    gc.freeze()  # What is there now stays: no collection during a step walks through it.
    return engine


def staged_blocks(config: LendingConfig, layers: int) -> int:
    """What the stagings of all creditors take, in the worker's own KV blocks."""
    staged = config.most_creditors * HALVES * config.staging_blocks if config.borrow else 0
    return -(-staged // layers)
