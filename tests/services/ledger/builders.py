"""Builders of heartbeats, and readers of the ledger's table."""

from typing import Any

from services.ledger.core.debt_ledger import DebtLedger
from shared.messages.lending import KvTier
from shared.messages.reports import WorkerReported
from tests.shared.messages.builders import worker_report

_BLOCKS = ("free", "total", "borrowed", "borrowed_free", "lendable", "host_lendable", "host_yielding")


def report(worker: str, *, lent_to: dict[str, int] | None = None, **fields: Any) -> WorkerReported:
    """Counts of blocks go by the names in `_BLOCKS`, and `borrowed_from` is as in the heartbeat."""
    lent = lent_to or {}
    fields = {"free": 10, "total": 20, "host": "here", "fingerprint": b"kv", "borrowed_from": {}, **fields}
    told = {f"{name}_blocks" if name in _BLOCKS else name: value for name, value in fields.items()}
    told["borrowed_from_blocks"] = told.pop("borrowed_from")
    return worker_report(worker, lent_blocks=sum(lent.values()), lent_to_blocks=lent, **told)


def promised_to(table: DebtLedger, worker_id: str, tier: KvTier = KvTier.DEVICE) -> set[str]:
    """Return the debtors that this worker's memory is promised to."""
    account = table.accounts.get(worker_id)
    return set() if account is None else set(account.offers[tier].promises)
