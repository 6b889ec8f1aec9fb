"""The global debt ledger: each worker's memory and debts, from the last heartbeats. Pure.

It is only loosely consistent: one round of heartbeats rebuilds it. Amounts are in tokens, because workers
may use blocks of different sizes.

`candidates` returns the creditors that a debtor should ask, sorted by (distance, −free, id), device memory
before host memory. Memory that was just offered to another debtor counts as taken, which spreads debtors
that ask at the same time. A worker whose memory is all promised comes last, but is still offered. The ledger
grants nothing: the creditor decides. Source: papers/001 §4.4 (gManager); `algorithms.md` §4.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from sortedcontainers import SortedKeyList

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
        self._keys: dict[str, tuple[int, str]] = {}
        self._hosts: dict[str, str] = {}
        self._all = _line()
        self._at: dict[str, SortedKeyList] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def put(self, worker_id: str, host: str, left: int) -> None:
        """Enter or move a worker with `left` tokens, which may be negative."""
        key = (-left, worker_id)
        if self._keys.get(worker_id) == key and self._hosts[worker_id] == host:
            return
        self.remove(worker_id)
        self._keys[worker_id], self._hosts[worker_id] = key, host
        self._all.add(key)
        if host:
            self._at.setdefault(host, _line()).add(key)

    def remove(self, worker_id: str) -> None:
        """Remove a worker, if present."""
        key = self._keys.pop(worker_id, None)
        if key is None:
            return
        self._all.remove(key)
        host = self._hosts.pop(worker_id)
        if host:
            self._at[host].remove(key)
            if not self._at[host]:
                del self._at[host]

    def within(self, host: str, *, has_left: bool) -> Iterator[str]:
        """Yield workers with something left, or those without: first the ones at `host`, then others."""
        near = self._at.get(host) if host else None
        bounds = {"max_key": _POSITIVE, "inclusive": (True, False)} if has_left else {"min_key": _POSITIVE}
        if near is not None:
            yield from (worker for _, worker in near.irange_key(**bounds))
        for _, worker in self._all.irange_key(**bounds):
            if near is None or self._hosts[worker] != host:
                yield worker

    def check_integrity(self) -> None:
        """Raise AssertionError when the orders disagree."""
        assert list(self._all) == sorted(self._keys.values())
        for host, line in self._at.items():
            assert list(line) == sorted(key for w, key in self._keys.items() if self._hosts[w] == host)


def _line() -> SortedKeyList:
    return SortedKeyList(key=lambda key: key)


@dataclass
class LendingOffer:
    """Memory that one worker would lend of one tier, and the debtors it was offered to."""

    free_tokens: int
    promises: dict[str, int] = field(default_factory=dict)
    """Tokens offered to each debtor since the last heartbeat."""
    refused: bool = False
    """The worker refused a debtor since this heartbeat."""

    @property
    def unpromised_tokens(self) -> int:
        return self.free_tokens - sum(self.promises.values())


@dataclass
class Account:
    """One worker's memory and loans, from its last heartbeat."""

    worker_id: str
    incarnation: int
    seq: int
    host: str
    block_tokens: int
    fingerprint: bytes
    total_tokens: int
    offers: dict[KvTier, LendingOffer]
    """Device memory that is free or evictable within its cap, and host memory kept for loans. Borrowed memory
    is never lent again."""
    yielding_tokens: int
    """Part of the host's offer that caches hold. It is not available to another cache."""
    lent_tokens: int
    borrowed_tokens: int
    lent_to_tokens: dict[str, int]
    borrowed_from_tokens: dict[str, int]
    """Device memory, like `lent_to_tokens`: settlements can bring it home."""
    host_lent_to_tokens: dict[str, int]
    host_borrowed_from_tokens: dict[str, int]

    @property
    def own_free_tokens(self) -> int:
        """Free tokens on its device."""
        return self.offers[KvTier.DEVICE].free_tokens


class DebtLedger:
    """One account per worker from heartbeats, with the promises since its last one.

    A worker that is silent for `silence_s` is dropped with its offers.
    """

    def __init__(self, *, silence_s: float = 2.0) -> None:
        self._accounts: dict[str, Account] = {}
        self.liveness = Liveness(silence_s)
        self._rankings = {tier: Ranking() for tier in KvTier}
        self._pointed_to: dict[str, tuple[str, KvTier]] = {}
        """The creditor and tier that each debtor was last pointed to."""

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def __len__(self) -> int:
        return len(self._accounts)

    def get(self, worker_id: str) -> Account | None:
        return self._accounts.get(worker_id)

    def best(self, host: str) -> Iterator[tuple[Account, KvTier]]:
        """Yield workers and tiers in the order to ask them. The table must not change meanwhile.

        Device memory comes before host memory, and memory that is promised to others after both.
        """
        for has_left in (True, False):
            for tier in (KvTier.DEVICE, KvTier.HOST):
                for worker_id in self._rankings[tier].within(host, has_left=has_left):
                    yield self._accounts[worker_id], tier

    def on_reported(self, report: WorkerReported, now_s: float) -> None:
        """Take in a heartbeat; ignore an older one than the last."""
        if not self.liveness.hear(report.worker_id, report.incarnation, now_s):
            return
        known = self._accounts.get(report.worker_id)
        if known is not None and known.incarnation == report.incarnation and report.seq <= known.seq:
            return
        if known is not None:
            self._forget_promises(*known.offers.values())
        account = self._accounts[report.worker_id] = _account(report)
        self._rank(account, *KvTier)

    def on_refused(self, creditor_ids: tuple[str, ...], tier: KvTier = KvTier.DEVICE) -> None:
        """Leave out creditors that refused, for that tier, until their next heartbeat."""
        for creditor_id in creditor_ids:
            account = self._accounts.get(creditor_id)
            if account is not None:
                account.offers[tier].refused = True
                self._forget_promises(account.offers[tier])
                self._rank(account, tier)

    def on_offered(self, creditor_id: str, debtor_id: str, tokens: int, tier: KvTier = KvTier.DEVICE) -> None:
        """Promise `tokens` of a creditor to a debtor, until the creditor's next heartbeat.

        The debtor's earlier offer ends.
        """
        self.withdraw_offer(debtor_id)
        account = self._accounts.get(creditor_id)
        if account is not None and not account.offers[tier].refused and creditor_id != debtor_id:
            account.offers[tier].promises[debtor_id] = tokens
            self._pointed_to[debtor_id] = creditor_id, tier
            self._rank(account, tier)

    def withdraw_offer(self, debtor_id: str) -> None:
        """End a debtor's offer: it asks again."""
        pointed_to = self._pointed_to.pop(debtor_id, None)
        if pointed_to is not None:
            creditor_id, tier = pointed_to
            account = self._accounts[creditor_id]
            del account.offers[tier].promises[debtor_id]
            self._rank(account, tier)

    def on_tick(self, now_s: float) -> list[str]:
        """Drop silent workers and return their ids."""
        silent = self.liveness.silent(now_s)
        for worker_id in silent:
            self._forget_promises(*self._accounts.pop(worker_id).offers.values())
            for ranking in self._rankings.values():
                ranking.remove(worker_id)
        return silent

    def debts(self) -> dict[tuple[str, str], int]:
        """Return owed tokens of device memory by (debtor, creditor) of living workers.

        Where the two disagree, one has missed a change, and the smaller amount is safe."""
        found: dict[tuple[str, str], int] = {}
        for debtor in self._accounts.values():
            for creditor_id, tokens in debtor.borrowed_from_tokens.items():
                creditor = self._accounts.get(creditor_id)
                lent = 0 if creditor is None else creditor.lent_to_tokens.get(debtor.worker_id, 0)
                if min(tokens, lent) > 0:
                    found[debtor.worker_id, creditor_id] = min(tokens, lent)
        return found

    def block_tokens(self) -> dict[str, int]:
        """Return the block size by worker."""
        return {account.worker_id: account.block_tokens for account in self._accounts.values()}

    def check_integrity(self) -> None:
        """Raise AssertionError when the table is inconsistent."""
        promised = 0
        assert self._accounts.keys() == set(self.liveness)
        for worker_id, account in self._accounts.items():
            assert worker_id == account.worker_id
            assert 0 <= account.own_free_tokens <= account.total_tokens
            for tier, offer in account.offers.items():
                assert worker_id not in offer.promises, "a worker was offered its own memory"
                assert not (offer.refused and offer.promises)
                promised += len(offer.promises)
                assert all(self._pointed_to[debtor] == (worker_id, tier) for debtor in offer.promises)
        assert promised == len(self._pointed_to), "a debtor is pointed to a promise that is not there"
        for tier, ranking in self._rankings.items():
            ranking.check_integrity()
            offers = [account.offers[tier] for account in self._accounts.values()]
            assert len(ranking) == sum(not offer.refused and offer.free_tokens > 0 for offer in offers)
        net: dict[str, int] = {}
        for (debtor_id, creditor_id), tokens in self.debts().items():
            net[debtor_id] = net.get(debtor_id, 0) - tokens
            net[creditor_id] = net.get(creditor_id, 0) + tokens
        assert sum(net.values()) == 0 and set(net) <= set(self._accounts)

    def _forget_promises(self, *offers: LendingOffer) -> None:
        for offer in offers:
            for debtor_id in offer.promises:
                del self._pointed_to[debtor_id]
            offer.promises.clear()

    def _rank(self, account: Account, *tiers: KvTier) -> None:
        for tier in tiers:
            offer = account.offers[tier]
            if offer.refused or offer.free_tokens <= 0:
                self._rankings[tier].remove(account.worker_id)
            else:
                self._rankings[tier].put(account.worker_id, account.host, offer.unpromised_tokens)


def _account(report: WorkerReported) -> Account:
    size, capacity = report.block_tokens, report.capacity

    def tokens(blocks: dict[str, int]) -> dict[str, int]:
        return {peer: count * size for peer, count in blocks.items()}

    own_free_blocks = min(capacity.plannable_blocks - capacity.borrowed_free_blocks, capacity.total_blocks)
    if capacity.lendable_blocks is not None:
        own_free_blocks = min(own_free_blocks, capacity.lendable_blocks)
    return Account(
        worker_id=report.worker_id,
        incarnation=report.incarnation,
        seq=report.seq,
        host=report.host,
        block_tokens=size,
        fingerprint=report.fingerprint,
        total_tokens=capacity.total_blocks * size,
        offers={
            KvTier.DEVICE: LendingOffer(max(0, own_free_blocks) * size),
            KvTier.HOST: LendingOffer((capacity.host_lendable_blocks + capacity.host_yielding_blocks) * size),
        },
        yielding_tokens=capacity.host_yielding_blocks * size,
        lent_tokens=(capacity.lent_blocks + capacity.host_lent_blocks) * size,
        borrowed_tokens=capacity.borrowed_blocks * size,
        lent_to_tokens=tokens(report.lent_to_blocks),
        borrowed_from_tokens=tokens(report.borrowed_from_blocks),
        host_lent_to_tokens=tokens(report.host_lent_to_blocks),
        host_borrowed_from_tokens=tokens(report.host_borrowed_from_blocks),
    )


OFFERED_CREDITORS = 3


def distance(debtor_host: str, creditor_host: str) -> int:
    """Return 0 on the same host, else 1. Unnamed hosts are never the same."""
    return int(not debtor_host or debtor_host != creditor_host)


def candidates(
    table: DebtLedger,
    debtor_id: str,
    tokens: int,
    refused_by: tuple[str, ...] = (),
    refused_host_by: tuple[str, ...] = (),
    *,
    for_cache: bool = False,
    limit: int = OFFERED_CREDITORS,
) -> list[CreditorCandidate]:
    """Return up to `limit` workers and tiers to ask, best first, and promise the first one's memory.

    `for_cache`: unused host memory only.
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
        if for_cache:
            unused_tokens = account.offers[KvTier.HOST].free_tokens - account.yielding_tokens
            fits = fits and tier is KvTier.HOST and unused_tokens > 0
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
