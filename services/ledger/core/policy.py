"""Whom a debtor should ask for memory. Source: papers/001 §4.4, `algorithms.md` §4.

Candidates are sorted by (distance, −free, id), device memory before host memory. Free memory that was just
pointed out to another debtor counts as taken, which spreads debtors that ask at the same time; a worker with
nothing left unpromised comes last, not never. It knows no bus and no clock, and grants nothing: the creditor
decides.
"""

from services.ledger.core.debt_ledger import Account, Table
from shared.messages.commands import CreditorCandidate
from shared.messages.lending import KvTier
from shared.messages.values import as_count

OFFERED_CREDITORS = 3
SAME_HOST, OTHER_HOST = 0, 1


def distance(debtor_host: str, creditor_host: str) -> int:
    """0 on the same host, 1 elsewhere; an unnamed host is nobody's neighbour."""
    return SAME_HOST if debtor_host and debtor_host == creditor_host else OTHER_HOST


def candidates(
    table: Table,
    debtor_id: str,
    tokens: int,
    refused_by: tuple[str, ...] = (),
    refused_host_by: tuple[str, ...] = (),
    *,
    limit: int = OFFERED_CREDITORS,
) -> list[CreditorCandidate]:
    """Up to `limit` workers to ask, best first, and for which tier of their memory.

    Notes in `table` what the first of them is asked for.
    """
    table.on_refused(refused_by)
    table.on_refused(refused_host_by, KvTier.HOST)
    table.withdraw_offer(debtor_id)
    debtor = table.get(debtor_id)
    host = debtor.host if debtor is not None else ""
    chosen: list[tuple[Account, KvTier]] = []
    for account, tier in table.best(host):
        if len(chosen) == limit:
            break
        fits = bool(account.fingerprint) and (debtor is None or debtor.fingerprint == account.fingerprint)
        if account.worker_id != debtor_id and fits:
            chosen.append((account, tier))
    if chosen:
        account, tier = chosen[0]
        table.on_offered(account.worker_id, debtor_id, min(tokens, account.offers[tier].free_tokens), tier)
    return [
        CreditorCandidate(
            worker_id=account.worker_id,
            free_tokens=as_count(account.offers[tier].free_tokens),
            distance=distance(host, account.host),
            tier=tier,
        )
        for account, tier in chosen
    ]
