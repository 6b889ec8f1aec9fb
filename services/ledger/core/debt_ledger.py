"""The global debt ledger: each worker's memory and debts in tokens, from the last heartbeats. Pure.

Memory that was just offered to another debtor counts as taken, which spreads debtors that ask together. The
ledger grants nothing: the creditor decides. Source: papers/001 §4.4 (gManager); `algorithms.md` §4.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from sortedcontainers import SortedList

from shared.liveness import Liveness
from shared.messages.commands import CreditorCandidate
from shared.messages.lending import KvTier
from shared.messages.reports import WorkerReported
from shared.messages.values import as_count

_POSITIVE = (0, "")
"""Sorts after the keys of all workers with something left, and before the others."""


class Ranking:
    """Worker ids by unpromised tokens, most first, then by id: of all workers, and of each host.

    Kept sorted, so a request reads a few entries, however many workers there are.
    """

    def __init__(self) -> None:
        self._keys: dict[str, tuple[tuple[int, str], str]] = {}
        """Key and host by worker."""
        self._all = SortedList()
        self._at: dict[str, SortedList] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def put(self, worker_id: str, host: str, left: int) -> None:
        """Enter or move a worker with `left` tokens, which may be negative."""
        key = (-left, worker_id)
        if self._keys.get(worker_id) == (key, host):
            return
        self.remove(worker_id)
        self._keys[worker_id] = key, host
        self._all.add(key)
        if host:
            self._at.setdefault(host, SortedList()).add(key)

    def remove(self, worker_id: str) -> None:
        """Remove a worker, if present."""
        key, host = self._keys.pop(worker_id, (None, ""))
        if key is not None:
            self._all.remove(key)
        if host:
            self._at[host].remove(key)
            if not self._at[host]:
                del self._at[host]

    def within(self, host: str, *, has_left: bool) -> Iterator[str]:
        """Yield workers with something left, or those without: first the ones at `host`, then others."""
        bounds = {"maximum": _POSITIVE, "inclusive": (True, False)} if has_left else {"minimum": _POSITIVE}
        for _, worker in self._at[host].irange(**bounds) if host in self._at else ():
            yield worker
        for _, worker in self._all.irange(**bounds):
            if host not in self._at or self._keys[worker][1] != host:
                yield worker

    def check_integrity(self) -> None:
        assert list(self._all) == sorted(key for key, _ in self._keys.values())
        for host, line in self._at.items():
            assert list(line) == sorted(key for key, at in self._keys.values() if at == host)


@dataclass
class LendingOffer:
    """Memory that one worker would lend of one tier, and the debtors it was offered to."""

    free_tokens: int
    promises: dict[str, int] = field(default_factory=dict)
    """Tokens offered to each debtor since the last heartbeat."""
    refused: bool = False
    """The worker refused a debtor since this heartbeat."""


@dataclass
class Account:
    """One worker's last heartbeat, and what it would lend of each tier. Borrowed memory is not lent again."""

    report: WorkerReported
    offers: dict[KvTier, LendingOffer]

    def tokens(self, blocks: int) -> int:
        """Return the tokens in that many of its blocks."""
        return blocks * self.report.block_tokens


class DebtLedger:
    """One account per worker from heartbeats, with the promises since its last one.

    A worker that is silent for `silence_s` is dropped with its offers.
    """

    def __init__(self, *, silence_s: float = 2.0) -> None:
        self.accounts: dict[str, Account] = {}
        self.liveness = Liveness(silence_s)
        self._rankings = {tier: Ranking() for tier in KvTier}
        self._pointed_to: dict[str, tuple[str, KvTier]] = {}
        """The creditor and tier that each debtor was last pointed to."""

    def best(self, host: str) -> Iterator[tuple[Account, KvTier]]:
        """Yield workers and tiers in the order to ask them. The table must not change meanwhile.

        Device memory comes before host memory, and memory that is promised to others after both.
        """
        for has_left in (True, False):
            for tier in (KvTier.DEVICE, KvTier.HOST):
                for worker_id in self._rankings[tier].within(host, has_left=has_left):
                    yield self.accounts[worker_id], tier

    def on_reported(self, report: WorkerReported, now_s: float) -> None:
        """Take in a heartbeat; ignore an older one than the last."""
        if not self.liveness.hear(report.worker_id, report.incarnation, now_s):
            return
        if (known := self.accounts.get(report.worker_id)) is not None:
            if known.report.incarnation == report.incarnation and report.seq <= known.report.seq:
                return
            self._forget_promises(*known.offers.values())
        capacity, size = report.capacity, report.block_tokens
        offers = {
            KvTier.DEVICE: LendingOffer(capacity.own_lendable_blocks * size),
            KvTier.HOST: LendingOffer((capacity.host_lendable_blocks + capacity.host_yielding_blocks) * size),
        }
        account = self.accounts[report.worker_id] = Account(report, offers)
        self._rank(account, *KvTier)

    def on_refused(self, creditor_ids: tuple[str, ...], tier: KvTier = KvTier.DEVICE) -> None:
        """Leave out creditors that refused, for that tier, until their next heartbeat."""
        for creditor_id in creditor_ids:
            account = self.accounts.get(creditor_id)
            if account is not None:
                account.offers[tier].refused = True
                self._forget_promises(account.offers[tier])
                self._rank(account, tier)

    def on_offered(self, creditor_id: str, debtor_id: str, tokens: int, tier: KvTier = KvTier.DEVICE) -> None:
        """Promise `tokens` of a creditor to a debtor, until the creditor's next heartbeat.

        The debtor's earlier offer ends.
        """
        self.withdraw_offer(debtor_id)
        account = self.accounts.get(creditor_id)
        if account is not None and not account.offers[tier].refused and creditor_id != debtor_id:
            account.offers[tier].promises[debtor_id] = tokens
            self._pointed_to[debtor_id] = creditor_id, tier
            self._rank(account, tier)

    def withdraw_offer(self, debtor_id: str) -> None:
        """End a debtor's offer: it asks again."""
        pointed_to = self._pointed_to.pop(debtor_id, None)
        if pointed_to is not None:
            creditor_id, tier = pointed_to
            account = self.accounts[creditor_id]
            del account.offers[tier].promises[debtor_id]
            self._rank(account, tier)

    def on_tick(self, now_s: float) -> list[str]:
        """Drop silent workers and return their ids."""
        silent = self.liveness.silent(now_s)
        for worker_id in silent:
            self._forget_promises(*self.accounts.pop(worker_id).offers.values())
            for ranking in self._rankings.values():
                ranking.remove(worker_id)
        return silent

    def debts(self) -> dict[tuple[str, str], int]:
        """Return owed tokens of device memory by (debtor, creditor) of living workers.

        Where the two disagree, one has missed a change, and the smaller amount is safe."""
        found: dict[tuple[str, str], int] = {}
        for debtor_id, debtor in self.accounts.items():
            for creditor_id, blocks in debtor.report.borrowed_from_blocks.items():
                if (creditor := self.accounts.get(creditor_id)) is not None:
                    lent = creditor.tokens(creditor.report.lent_to_blocks.get(debtor_id, 0))
                    if (tokens := min(debtor.tokens(blocks), lent)) > 0:
                        found[debtor_id, creditor_id] = tokens
        return found

    def block_tokens(self) -> dict[str, int]:
        """Return the block size by worker."""
        return {name: account.report.block_tokens for name, account in self.accounts.items()}

    def check_integrity(self) -> None:
        promised = 0
        assert self.accounts.keys() == set(self.liveness)
        for worker_id, account in self.accounts.items():
            total_tokens = account.tokens(account.report.capacity.total_blocks)
            assert worker_id == account.report.worker_id
            assert 0 <= account.offers[KvTier.DEVICE].free_tokens <= total_tokens
            for tier, offer in account.offers.items():
                assert worker_id not in offer.promises, "a worker was offered its own memory"
                assert not (offer.refused and offer.promises)
                promised += len(offer.promises)
                assert all(self._pointed_to[debtor] == (worker_id, tier) for debtor in offer.promises)
        assert promised == len(self._pointed_to), "a debtor is pointed to a promise that is not there"
        for tier, ranking in self._rankings.items():
            ranking.check_integrity()
            offers = [account.offers[tier] for account in self.accounts.values()]
            assert len(ranking) == sum(not offer.refused and offer.free_tokens > 0 for offer in offers)
        net: dict[str, int] = {}
        for (debtor_id, creditor_id), tokens in self.debts().items():
            net[debtor_id] = net.get(debtor_id, 0) - tokens
            net[creditor_id] = net.get(creditor_id, 0) + tokens
        assert sum(net.values()) == 0 and set(net) <= set(self.accounts)

    def _forget_promises(self, *offers: LendingOffer) -> None:
        for offer in offers:
            for debtor_id in offer.promises:
                del self._pointed_to[debtor_id]
            offer.promises.clear()

    def _rank(self, account: Account, *tiers: KvTier) -> None:
        for tier in tiers:
            offer = account.offers[tier]
            if offer.refused or offer.free_tokens <= 0:
                self._rankings[tier].remove(account.report.worker_id)
            else:
                left = offer.free_tokens - sum(offer.promises.values())
                self._rankings[tier].put(account.report.worker_id, account.report.host, left)


OFFERED_CREDITORS = 3


def candidates(
    table: DebtLedger,
    debtor_id: str,
    tokens: int,
    refused_by: tuple[str, ...] = (),
    refused_host_by: tuple[str, ...] = (),
    *,
    for_cache: bool = False,
) -> list[CreditorCandidate]:
    """Return up to `OFFERED_CREDITORS` workers and tiers to ask, best first, and promise the first one's
    memory. `for_cache`: unused host memory only. The distance is 0 on the same, named host, else 1."""
    table.on_refused(refused_by)
    table.on_refused(refused_host_by, KvTier.HOST)
    table.withdraw_offer(debtor_id)
    debtor = table.accounts.get(debtor_id)
    host = debtor.report.host if debtor is not None else ""
    found: list[CreditorCandidate] = []
    for account, tier in table.best(host):
        report, free_tokens = account.report, account.offers[tier].free_tokens
        fits = bool(report.fingerprint) and (
            debtor is None or debtor.report.fingerprint == report.fingerprint
        )
        if for_cache:
            fits = fits and tier is KvTier.HOST and report.capacity.host_lendable_blocks > 0
        if report.worker_id != debtor_id and fits:
            candidate = CreditorCandidate(
                worker_id=report.worker_id,
                free_tokens=as_count(free_tokens),
                distance=int(not host or host != report.host),
                tier=tier,
            )
            found.append(candidate)
            if len(found) == OFFERED_CREDITORS:
                break
    if found:
        first = found[0]
        table.on_offered(first.worker_id, debtor_id, min(tokens, first.free_tokens), first.tier)
    return found
