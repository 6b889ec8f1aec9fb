"""The table of accounts."""

from services.ledger.state import Table
from shared.messages.reports import Capacity, WorkerReported


def report(
    worker: str,
    *,
    free: int = 10,
    total: int = 20,
    borrowed: int = 0,
    seq: int = 1,
    incarnation: int = 1,
    host: str = "here",
    lent_to: dict[str, int] | None = None,
) -> WorkerReported:
    lent = lent_to or {}
    return WorkerReported(
        worker_id=worker,
        incarnation=incarnation,
        seq=seq,
        stepped_seq=0,
        epoch=1,
        plan_seq=0,
        model="m",
        block_tokens=16,
        max_context_tokens=320,
        capacity=Capacity(
            total_blocks=total, free_blocks=free, borrowed_blocks=borrowed, lent_blocks=sum(lent.values())
        ),
        host=host,
        lent_to_blocks=lent,
    )


def test_amounts_become_tokens_and_borrowed_memory_is_not_ones_own() -> None:
    table = Table()
    table.on_reported(report("w0", free=10, borrowed=4, lent_to={"w1": 3}), 0.0)
    account = table.get("w0")
    assert account is not None
    assert (account.total_tokens, account.own_free_tokens) == (320, 96)
    assert account.lent_to_tokens == {"w1": 48}
    assert account.lent_tokens == 48
    table.check_integrity()


def test_old_news_is_ignored() -> None:
    table = Table()
    table.on_reported(report("w0", free=5, seq=7), 0.0)
    table.on_reported(report("w0", free=9, seq=7), 0.1)
    table.on_reported(report("w0", free=9, seq=99, incarnation=0), 0.1)
    account = table.get("w0")
    assert account is not None
    assert account.own_free_tokens == 5 * 16
    table.on_reported(report("w0", free=9, seq=1, incarnation=2), 0.2)
    account = table.get("w0")
    assert account is not None
    assert account.own_free_tokens == 9 * 16


def test_silent_workers_are_dropped() -> None:
    table = Table(silence_s=2.0)
    table.on_reported(report("w0"), 0.0)
    table.on_reported(report("w1"), 1.5)
    assert table.on_tick(2.5) == ["w0"]
    assert [account.worker_id for account in table] == ["w1"]


def test_a_refusal_and_a_promise_last_until_the_next_heartbeat() -> None:
    table = Table()
    table.on_reported(report("w0"), 0.0)
    table.on_offered("w0", "w1", 64)
    account = table.get("w0")
    assert account is not None
    assert account.unpromised_tokens == 96
    table.on_refused(("w0", "nobody"))
    assert account.refused
    table.on_reported(report("w0", seq=2), 0.25)
    account = table.get("w0")
    assert account is not None
    assert not account.refused
    assert account.unpromised_tokens == 160
    table.check_integrity()
