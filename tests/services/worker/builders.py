"""What tests of a worker's core begin with."""

from services.worker.core.prefixes import Prefixes
from services.worker.core.reports import Identity
from services.worker.core.sequences import SequenceLimits, SequenceTable
from services.worker.core.steps import StepCore
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.core.borrowed_pool import Pool
from tests.shared.messages.builders import BLOCK_TOKENS

LIMITS = SequenceLimits(max_context_tokens=64, vocabulary=100, end_retention_s=60.0, gateway_timeout_s=10.0)


def core_of(pool: Pool | int, prefixes: Prefixes | None = None, limits: SequenceLimits = LIMITS) -> StepCore:
    """Return the core of an idle worker over a pool, or over one of so many blocks."""
    blocks = BlockPool(pool, BLOCK_TOKENS) if isinstance(pool, int) else pool
    return StepCore(Identity("worker-0", 1, "model", 64, "host"), SequenceTable(blocks, limits, prefixes))
