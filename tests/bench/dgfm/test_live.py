"""What the witness of a live run makes of what it hears."""

from bench.dgfm.live import _Witness
from shared.messages.plans import WorkerStepped
from tests.services.ledger.test_state import report


def stepped(plan: int, done: int, step_s: float = 0.01) -> WorkerStepped:
    return WorkerStepped(
        worker_id="w0",
        incarnation=1,
        seq=1,
        epoch=1,
        plan_seq=plan,
        steps_done=done,
        plan_over=False,
        decoded_tokens=7,
        step_s=step_s,
    )


def heard(borrowed: int, idle: int) -> _Witness:
    witness = _Witness()
    witness.on_reported(report("w0", total=20, free=4, borrowed=borrowed, borrowed_free=idle))
    witness.begin()
    return witness


def test_a_step_is_remote_where_borrowed_blocks_are_in_use() -> None:
    witness = heard(borrowed=3, idle=1)
    witness.on_stepped(stepped(plan=1, done=2))
    witness.on_stepped(stepped(plan=1, done=6))
    witness.on_stepped(stepped(plan=2, done=1))
    witness.on_stepped(stepped(plan=2, done=1, step_s=0.0))
    assert [(one.steps, one.is_remote) for one in witness.steps] == [(2, True), (4, True), (1, True)]
    assert sum(tokens for _, tokens in witness.decoded) == 28
    assert witness.used_blocks() == (2, 16)


def test_idle_borrowed_blocks_make_no_step_remote() -> None:
    witness = heard(borrowed=3, idle=3)
    witness.on_stepped(stepped(plan=1, done=1))
    assert [one.is_remote for one in witness.steps] == [False]
    assert witness.used_blocks()[0] == 0
