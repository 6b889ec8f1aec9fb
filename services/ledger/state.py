"""Who has how much memory and who lent what to whom, as the last heartbeats said. Source: papers/001 §5
(gManager).

Loosely coherent on purpose: the table is rebuilt from one round of heartbeats and nothing else is needed. It
knows no bus and no clock; `now_s` is passed in. Amounts are tokens here (workers may use blocks of different
size).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from shared.messages.reports import WorkerReported


@dataclass(frozen=True)
class Promise:
    """Tokens of a creditor that were pointed out to a debtor and are not in a heartbeat yet."""

    debtor_id: str
    tokens: int


@dataclass
class Account:
    """One worker's memory."""

    worker_id: str
    incarnation: int
    seq: int
    host: str
    block_tokens: int
    total_tokens: int
    own_free_tokens: int
    """What it could lend: free or evictable; borrowed memory does not count, nobody re-lends it."""
    lent_tokens: int
    borrowed_tokens: int
    lent_to_tokens: dict[str, int]
    borrowed_from_tokens: dict[str, int]
    heard_s: float
    promises: dict[str, Promise] = field(default_factory=dict)
    refused: bool = False
    """A debtor was turned down since this heartbeat."""

    @property
    def unpromised_tokens(self) -> int:
        return self.own_free_tokens - sum(promise.tokens for promise in self.promises.values())


class Table:
    """Accounts by worker id. A worker that is silent for `silence_s` is dropped."""

    def __init__(self, *, silence_s: float = 2.0) -> None:
        self.silence_s = silence_s
        self._accounts: dict[str, Account] = {}

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def __len__(self) -> int:
        return len(self._accounts)

    def get(self, worker_id: str) -> Account | None:
        return self._accounts.get(worker_id)

    def on_reported(self, report: WorkerReported, now_s: float) -> None:
        """Takes a heartbeat in; one that is older than what is known is ignored."""
        known = self._accounts.get(report.worker_id)
        if known is not None and (report.incarnation, report.seq) <= (known.incarnation, known.seq):
            return
        self._accounts[report.worker_id] = _account(report, now_s)

    def on_refused(self, creditor_ids: tuple[str, ...]) -> None:
        """These turned a debtor down; they are left out until their next heartbeat."""
        for creditor_id in creditor_ids:
            account = self._accounts.get(creditor_id)
            if account is not None:
                account.refused = True
                account.promises.clear()

    def on_offered(self, creditor_id: str, debtor_id: str, tokens: int) -> None:
        """`tokens` of a creditor were pointed out to a debtor: taken, until the creditor's next heartbeat."""
        account = self._accounts.get(creditor_id)
        if account is not None:
            account.promises[debtor_id] = Promise(debtor_id, tokens)

    def on_tick(self, now_s: float) -> list[str]:
        """Drops silent workers and returns their ids."""
        silent = [a.worker_id for a in self._accounts.values() if now_s - a.heard_s > self.silence_s]
        for worker_id in silent:
            del self._accounts[worker_id]
        return silent

    def check_integrity(self) -> None:
        """Raises AssertionError when the table contradicts itself."""
        for worker_id, account in self._accounts.items():
            assert worker_id == account.worker_id
            assert 0 <= account.own_free_tokens <= account.total_tokens
            assert worker_id not in account.promises, "a worker was offered its own memory"
            assert not (account.refused and account.promises)


def _account(report: WorkerReported, now_s: float) -> Account:
    size, capacity = report.block_tokens, report.capacity
    own_free_blocks = min(capacity.plannable_blocks, capacity.total_blocks) - capacity.borrowed_blocks
    return Account(
        worker_id=report.worker_id,
        incarnation=report.incarnation,
        seq=report.seq,
        host=report.host,
        block_tokens=size,
        total_tokens=capacity.total_blocks * size,
        own_free_tokens=max(0, own_free_blocks) * size,
        lent_tokens=capacity.lent_blocks * size,
        borrowed_tokens=capacity.borrowed_blocks * size,
        lent_to_tokens={peer: blocks * size for peer, blocks in report.lent_to_blocks.items()},
        borrowed_from_tokens={peer: blocks * size for peer, blocks in report.borrowed_from_blocks.items()},
        heard_s=now_s,
    )
