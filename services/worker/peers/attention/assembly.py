"""Builds the borrower and the creditor of an engine, for attention over tensors or over tokens."""

from collections.abc import Callable

import numpy as np

from services.worker.door import Door
from services.worker.engine.contract import AttendingEngine, SharingEngine, TokenEngine
from services.worker.kv.core.borrowed_pool import ExtendedPool
from services.worker.kv.transfers import TransferEngine
from services.worker.peers.attention.borrower import Borrower
from services.worker.peers.attention.core.cost import ComputeBudget
from services.worker.peers.attention.creditor import Creditor, LentGrants
from services.worker.peers.attention.interfaces import BlockDebtor, LentBlocks
from services.worker.peers.attention.tokens import TokenDebtor, TokenMemory
from services.worker.peers.registry import Registry
from services.worker.peers.settings import LendingConfig
from shared.clock import Clock


def make_borrower(
    engine: SharingEngine,
    pool: ExtendedPool,
    door: Door,
    registry: Registry,
    settings: LendingConfig,
    transfers: TransferEngine,
    on_failed: Callable[[str], None],
    clock: Clock,
) -> Borrower:
    """Return the borrower of an engine. `on_failed` gets failed creditors, on the engine's thread.

    Raises ConfigError where parts cannot be joined."""
    debtor: BlockDebtor
    if isinstance(engine, TokenEngine):
        debtor = TokenDebtor(engine, most_creditors=settings.most_creditors, deadline_s=settings.answer_s)
    else:
        from services.worker.peers.attention.debtor import AttendingDebtor  # Needs torch.

        assert isinstance(engine, AttendingEngine)
        debtor = AttendingDebtor(
            engine.attention,
            q_heads=engine.q_heads,
            own_blocks=engine.own_ids,
            block_tokens=engine.block_tokens,
            staging_blocks=settings.staging_blocks,
            most_creditors=settings.most_creditors,
            deadline_s=settings.answer_s,
            rates=registry.rates,
            link_bytes_per_s=settings.link_bytes_per_s,
            clock=clock,
        )
    return Borrower(debtor, pool, door, registry, engine.pools, transfers, on_failed)


def make_creditor(
    engine: SharingEngine,
    grants: LentGrants,
    settings: LendingConfig,
    host: LentBlocks | None,
    registry: Registry,
    *,
    is_busy: Callable[[], bool],
    clock: Clock,
) -> Creditor:
    """Return a creditor that answers on the links of `registry`.

    `is_busy`: whether the engine has steps to run."""
    creditor = Creditor(
        _device_memory(engine),
        grants,
        ComputeBudget(settings.max_remote_attention_fraction),
        block_tokens=engine.block_tokens,
        clock=clock,
        is_busy=is_busy,
        host=host,
    )
    for kind, receiver in creditor.receivers.items():
        registry.plane.desk.serve(kind, receiver)
    return creditor


def _device_memory(engine: SharingEngine) -> LentBlocks:
    if isinstance(engine, TokenEngine):
        return TokenMemory(engine.tokens, engine)
    from services.worker.peers.attention.memory import device_memory  # Needs torch.

    assert isinstance(engine, AttendingEngine)
    return device_memory(engine.attention)


def lent_host_memory(config: LendingConfig, engine: SharingEngine, blocks: int) -> LentBlocks | None:
    """Return `blocks` of lent host memory; None without any."""
    if not blocks:
        return None
    attends = config.host_attention.attends(engine.device_type)
    if isinstance(engine, TokenEngine):
        tokens = np.zeros((blocks, engine.block_tokens), dtype=engine.tokens.dtype)
        return TokenMemory(tokens, engine, attends)
    from services.worker.peers.attention.memory import host_memory  # Needs torch.

    assert isinstance(engine, AttendingEngine)
    return host_memory(engine.attention, blocks, attends=attends)
