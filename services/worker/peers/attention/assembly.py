"""Attention over keys that others hold, and over the own ones for others: put together for an engine."""

from collections.abc import Callable

from services.worker.door import Door
from services.worker.engine.contract import AttendingEngine
from services.worker.kv.core.borrowed_pool import ExtendedPool
from services.worker.kv.transfers import TransferEngine
from services.worker.peers.attention.borrower import Borrower
from services.worker.peers.attention.core.cost import ComputeBudget
from services.worker.peers.attention.creditor import Creditor, LentGrants
from services.worker.peers.attention.debtor import Debtor
from services.worker.peers.attention.homeward import Homeward
from services.worker.peers.attention.memory import LentMemory, host_blocks, host_memory
from services.worker.peers.lending.core.grants import Freed
from services.worker.peers.lending.core.settings import LendingConfig
from services.worker.peers.lending.service import Lending
from services.worker.peers.registry import Registry
from shared.clock import Clock


def make_borrower(
    engine: AttendingEngine,
    pool: ExtendedPool,
    door: Door,
    registry: Registry,
    settings: LendingConfig,
    transfers: TransferEngine,
    on_failed: Callable[[str], None],
    clock: Clock,
) -> Borrower:
    """`on_failed` hears of creditors that fail, on the engine's thread. Raises ConfigError where parts cannot
    be joined."""
    debtor = Debtor(
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
    homeward = Homeward(engine.attention, debtor, registry, transfers, clock)
    return Borrower(debtor, pool, door, registry, homeward, on_failed)


def make_creditor(
    engine: AttendingEngine,
    lending: Lending,
    settings: LendingConfig,
    host: LentMemory | None,
    registry: Registry,
    *,
    on_freed: Callable[[Freed], None],
    is_busy: Callable[[], bool],
    clock: Clock,
) -> Creditor:
    """Answers on the links of `registry` from now on. `on_freed` is called on their threads; `is_busy`: there
    are steps to run."""
    creditor = Creditor(
        engine.attention,
        LentGrants(lending.grants, lending.table, on_freed, clock),
        ComputeBudget(settings.max_remote_attention_fraction),
        block_tokens=engine.block_tokens,
        clock=clock,
        is_busy=is_busy,
        host=host,
    )
    for kind, receiver in creditor.receivers.items():
        registry.plane.desk.serve(kind, receiver)
    return creditor


def lent_host_memory(config: LendingConfig, engine: AttendingEngine) -> LentMemory | None:
    """None where none is lent. Raises ConfigError where the settings grant less than a block."""
    blocks = host_blocks(config, engine.attention) if config.lend else 0
    if not blocks:
        return None
    attends = config.host_attention.attends(engine.device_type)
    return host_memory(engine.attention, blocks, attends=attends)
