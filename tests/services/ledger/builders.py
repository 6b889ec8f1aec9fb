"""Builders of heartbeats, and readers of the ledger's table."""

from services.ledger.core.debt_ledger import DebtLedger
from shared.messages.lending import KvTier
from shared.messages.reports import WorkerReported
from tests.shared.messages.builders import worker_report


def report(
    worker: str,
    *,
    free: int = 10,
    total: int = 20,
    borrowed: int = 0,
    borrowed_free: int = 0,
    lendable: int | None = None,
    host_lendable: int = 0,
    host_yielding: int = 0,
    seq: int = 1,
    incarnation: int = 1,
    host: str = "here",
    lent_to: dict[str, int] | None = None,
    borrowed_from: dict[str, int] | None = None,
    fingerprint: bytes = b"kv",
) -> WorkerReported:
    lent = lent_to or {}
    return worker_report(
        worker,
        incarnation=incarnation,
        seq=seq,
        total_blocks=total,
        free_blocks=free,
        borrowed_blocks=borrowed,
        borrowed_free_blocks=borrowed_free,
        lendable_blocks=lendable,
        host_lendable_blocks=host_lendable,
        host_yielding_blocks=host_yielding,
        lent_blocks=sum(lent.values()),
        host=host,
        lent_to_blocks=lent,
        borrowed_from_blocks=borrowed_from or {},
        fingerprint=fingerprint,
    )


def promised_to(table: DebtLedger, worker_id: str, tier: KvTier = KvTier.DEVICE) -> set[str]:
    """Return the debtors that this worker's memory is promised to."""
    account = table.accounts.get(worker_id)
    return set() if account is None else set(account.offers[tier].promises)
