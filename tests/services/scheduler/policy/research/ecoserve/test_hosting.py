"""`ecoserve` with pipelining: guests run in what their hosts do not need yet, and nothing is used twice.

Slots of a host: how many, how long, and what becomes of them when somebody leaves.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.policy.batch_builder import Job
from services.scheduler.policy.contract import PlannedBatch, PolicySettings, Task, WorkerShape
from services.scheduler.policy.research.ecoserve.hosting import (
    Lodging,
    limit_tokens,
    lodge,
    move_out,
    open_slots,
)
from services.scheduler.policy.research.ecoserve.planner import EcoServe, EcoServeSDO
from tests.services.scheduler.policy.batch_rig import (
    BLOCK_TOKENS,
    BatchRig,
    Jobs,
    guesses_of,
    in_turn,
    jobs_of,
    play,
    rig,
    settings_of,
    truth,
)
from tests.shared.messages.builders import predicted

EXACT = PolicySettings(token_budget=64, max_steps=1, options={"pad": 0, "reserve_ratio": 0.0, "buffer": 0.1})


def policy_of(bench: BatchRig) -> EcoServe:
    assert isinstance(bench.policy, EcoServe)
    return bench.policy


def guests(bench: BatchRig) -> list[Lodging]:
    lodgings = policy_of(bench)._hosting.lodgings
    in_order = [lodgings[key] for key in policy_of(bench)._table.jobs if key in lodgings]
    return [lodging for lodging in in_order if lodging.host is not None]


def arrive_both(bench: BatchRig, length: int) -> None:
    bench.arrive("host", 8, 80, 85)
    bench.turn()
    bench.turn()
    bench.arrive("guest", 8, length, 85)
    bench.turn()
    bench.turn()


def host_and_guest(policy_settings: PolicySettings = EXACT, *, blocks: int = 25) -> BatchRig:
    """One answer of 80 tokens, and a short one that only fits into its right half."""
    bench = rig(EcoServe, policy_settings, blocks=blocks, lag=0)
    bench.predict = truth
    arrive_both(bench, 20)
    return bench


def test_a_short_one_runs_inside_a_long_one() -> None:
    bench = host_and_guest()
    assert [guest.job.task.key[0] for guest in guests(bench)] == ["guest"]
    assert {decode.key[0] for decode in bench.batches[-1].decodes} == {"host", "guest"}
    most = 0
    while bench.unfinished:
        bench.turn()
        most = max(most, sum(job.blocks for job in bench.jobs.values()))
    assert most <= 25 and not any(batch.preemptions for batch in bench.batches)


def test_without_pipelining_it_has_to_wait() -> None:
    bench = rig(EcoServeSDO, EXACT, blocks=25, lag=0)
    bench.predict = truth
    arrive_both(bench, 20)
    assert [decode.key[0] for decode in bench.batches[-1].decodes] == ["host"]
    bench.finish()


@pytest.mark.parametrize("blocks", [25, 26])
def test_a_guest_that_is_not_done_gets_a_reserve_block_or_goes(blocks: int) -> None:
    """It really has 60 tokens, not 20; of 26 blocks one is left for it when it outlives its prediction."""
    bench = rig(EcoServe, EXACT, blocks=blocks, lag=0)
    bench.predict = lambda job, generated: predicted({"host": 80, "guest": 20}[job.task.key[0]])
    arrive_both(bench, 60)
    assert guests(bench)
    bench.finish()
    gone = [item.key[0] for batch in bench.batches for item in batch.preemptions]
    assert gone == ["guest"]


def test_a_host_that_ends_early_makes_its_guest_an_owner() -> None:
    bench = host_and_guest()
    guest = guests(bench)[0]
    own, hosted = guest.job.own_blocks, guest.job.hosted_blocks
    bench.end(bench.jobs[("host", 0)])
    assert guest.host is None and guest.job.own_blocks == own + hosted and hosted > 0
    bench.finish()


def test_a_guest_that_ends_opens_its_slot_to_the_next() -> None:
    bench = host_and_guest()
    bench.end(bench.jobs[("guest", 0)])
    bench.arrive("next", 8, 16, 85)
    for _ in range(3):
        bench.turn()
    assert [guest.job.task.key[0] for guest in guests(bench)] == ["next"]
    bench.finish()


def test_a_smaller_worker_parts_all() -> None:
    bench = host_and_guest()
    bench.resize(23)
    assert guests(bench) == []
    bench.policy.check_integrity()
    bench.resize(28)
    bench.finish()


def test_the_loosest_deadline_of_those_close_below_the_limit_is_lodged() -> None:
    policy = EcoServe(WorkerShape(BLOCK_TOKENS, 31), EXACT)
    for name, length, deadline_s in (("host", 80, 0.1), ("tight", 30, 0.3), ("loose", 28, 99.0)):
        task = Task((name, 0), 8, 85, 0.0, deadline_s=deadline_s, prediction=predicted(length))
        policy.on_arrival(task, 0.0)
        if name == "host":
            assert policy.plan(0.0) is not None and policy.plan(0.0) is not None
    assert policy.plan(0.0) is not None and policy.plan(0.0) is not None
    lodged = [job.task.key[0] for job in policy._table.jobs.values() if policy._hosting.is_guest(job)]
    assert lodged == ["loose"]


mixed_jobs = st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 120), st.integers(60, 150), st.integers(0, 4)),
    min_size=5,
    max_size=25,
)


@settings(max_examples=150)
@given(
    jobs=mixed_jobs,
    policy_settings=settings_of,
    guesses=guesses_of,
    lag=st.integers(0, 2),
    honest=st.booleans(),
)
def test_long_answers_in_little_memory_end_whatever_is_predicted(
    jobs: Jobs, policy_settings: PolicySettings, guesses: list[int | None], lag: int, honest: bool
) -> None:
    bench = rig(EcoServe, policy_settings, blocks=48, lag=lag)
    bench.predict = truth if honest else in_turn(guesses)
    play(bench, jobs)


@settings(max_examples=40)
@given(jobs=jobs_of)
def test_a_guest_runs_whenever_its_host_does(jobs: Jobs) -> None:
    bench = rig(EcoServe, EXACT, blocks=48, lag=0)
    bench.predict = truth

    def check(batch: PlannedBatch) -> None:
        running = {decode.key for decode in batch.decodes}
        for guest in guests(bench):
            job = guest.job
            if guest.host is not None and guest.host.job.task.key in running and job.missing_tokens:
                assert job.task.key in running or job.task.key in {item.key for item in batch.prefills}

    bench.on_batch = check
    play(bench, jobs)


def lodging_of(name: str, held: int, own: int) -> Lodging:
    task = Task((name, 0), held * BLOCK_TOKENS, 1000, 0.0)
    return Lodging(Job(task, 1, None, computed_tokens=held * BLOCK_TOKENS, held_blocks=held, own_blocks=own))


def spans(host: Lodging) -> list[tuple[int, int, int]]:
    return [(slot.start, slot.end, slot.level) for slot in host.slots]


def test_one_two_and_four_slots_in_all() -> None:
    """Russian dolls: the same inside every guest, to level 3."""
    host = lodging_of("host", 0, 64)
    open_slots(host)
    levels = []
    pending = [host]
    while pending:
        lodging = pending.pop()
        for slot in lodging.slots:
            levels.append(slot.level)
            guest = lodging_of("guest", 1, 1)
            lodge(lodging, slot, guest, slot.end - slot.start)
            open_slots(guest)
            pending.append(guest)
    assert sorted(levels) == [1, 2, 2, 3, 3, 3, 3]


def test_limits_leave_a_buffer_and_shrink_as_the_host_goes_on() -> None:
    host = lodging_of("host", 2, 2 + 16)
    open_slots(host)
    right, quarter = host.slots[-1], host.slots[-2]
    # 8 blocks of 4 tokens to go until the right half, less ceil(0.15 * 64 / 2) = 5: 27 tokens, 6 blocks
    assert limit_tokens(host, right, 0.15, BLOCK_TOKENS) == 24
    # 16 tokens less ceil(0.15 * 64 / 4) = 3
    assert limit_tokens(host, quarter, 0.15, BLOCK_TOKENS) == 12
    host.job.computed_tokens += 10
    assert limit_tokens(host, right, 0.15, BLOCK_TOKENS) == 16
    host.job.computed_tokens += 100
    assert limit_tokens(host, right, 0.15, BLOCK_TOKENS) == 0


@given(blocks=st.integers(0, 300), buffer=st.floats(0, 1), tokens=st.integers(0, 300))
def test_no_limit_is_negative_or_longer_than_its_slot(blocks: int, buffer: float, tokens: int) -> None:
    host = lodging_of("host", 1, 1 + blocks)
    open_slots(host)
    host.job.computed_tokens += tokens
    for slot in host.slots:
        limit = limit_tokens(host, slot, buffer, BLOCK_TOKENS)
        assert 0 <= limit <= (slot.end - slot.start) * BLOCK_TOKENS and limit % BLOCK_TOKENS == 0
        assert host.job.computed_tokens + limit <= slot.start * BLOCK_TOKENS or limit == 0


def nested() -> tuple[Lodging, Lodging, Lodging]:
    """A guest of 8 blocks in the host's right half, and one of 4 in that."""
    host, guest, inner = lodging_of("host", 0, 16), lodging_of("guest", 2, 2), lodging_of("inner", 1, 1)
    open_slots(host)
    lodge(host, host.slots[-1], guest, 8)
    open_slots(guest)
    lodge(guest, guest.slots[-1], inner, 4)
    return host, guest, inner


def test_a_guest_that_ends_leaves_its_slot_to_its_own_guest() -> None:
    host, guest, inner = nested()
    assert move_out(guest) == []
    assert inner.host is host and guest.host is None and guest.job.hosted_blocks == 0
    # the right half [8, 16): open again up to the inner one, who had the last 4 of 8
    assert spans(host)[-2:] == [(8, 12, 1), (12, 16, 2)]
    assert host.slots[-1].guest is inner and host.slots[-2].guest is None


@pytest.mark.parametrize(("taken", "owed"), [(3, 0), (5, 1), (7, 3)])
def test_what_the_host_has_taken_back_cannot_be_lent_on(taken: int, owed: int) -> None:
    """The guest made room for its host with `taken` blocks of the reserve before it left."""
    host, guest, inner = nested()
    slot = host.slots[-1]
    slot.start += taken
    guest.job.own_blocks += taken
    guest.job.hosted_blocks -= taken
    expected = [(inner, owed)] if owed else []
    assert move_out(guest) == expected
    last = host.slots[-1]
    assert last.guest is inner and last.start >= 8 + taken and last.end == 16
    assert last.end - last.start == 4 - owed
