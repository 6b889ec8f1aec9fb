"""Who may borrow: the oldest always, younger ones only beside it."""

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.roster import Claim, is_deprived, who_may_borrow
from shared.messages.reports import Capacity

OWN, MOST_LENT = 10, 8
workers = st.integers(2, 6)


def capacities(count: int, **fields: int) -> dict[str, Capacity]:
    one = Capacity(total_blocks=OWN, free_blocks=OWN, most_lent_blocks=MOST_LENT, **fields)
    return {f"w{number}": one for number in range(count)}


def claim(age: int, worker: int, blocks: int) -> Claim:
    return Claim((float(age), (f"r{age}", 0)), f"w{worker}", blocks)


def test_of_two_that_do_not_fit_together_the_older_goes_first() -> None:
    older, younger = claim(1, 1, 15), claim(2, 0, 15)
    assert who_may_borrow([younger, older], capacities(2)) == [older]
    assert who_may_borrow([younger], capacities(2)) == [younger]


def test_those_that_fit_beside_each_other_go_together() -> None:
    both = [claim(1, 0, 17), claim(2, 1, 17)]
    assert who_may_borrow(both, capacities(4)) == both
    assert who_may_borrow(both, capacities(3)) == both[:1], "14 blocks missing, one lender of 8"


def test_one_worker_gathers_for_the_longest_of_its_own() -> None:
    mine = [claim(1, 0, 12), claim(2, 0, 16)]
    assert who_may_borrow(mine, capacities(2)) == [mine[1]]


def test_blocks_that_are_borrowed_or_lent_are_not_a_workers_own() -> None:
    assert not is_deprived(10, Capacity(total_blocks=10, free_blocks=0))
    assert is_deprived(10, Capacity(total_blocks=14, free_blocks=0, borrowed_blocks=5))
    assert is_deprived(10, Capacity(total_blocks=9, free_blocks=0, lent_blocks=1))


@given(workers, st.lists(st.tuples(st.integers(0, 5), st.integers(1, 50)), min_size=1, max_size=12))
def test_the_oldest_is_served_and_others_leave_it_enough(count: int, asked: list[tuple[int, int]]) -> None:
    claims = [claim(age, worker % count, blocks) for age, (worker, blocks) in enumerate(asked)]
    chosen = who_may_borrow(reversed(claims), capacities(count))
    names = [one.worker_id for one in chosen]
    assert claims[0].worker_id in names and len(names) == len(set(names))
    assert all(one.blocks >= claims[0].blocks for one in chosen if one.worker_id == claims[0].worker_id)
    if chosen != claims[:1]:
        missing = sum(max(0, one.blocks - OWN) for one in chosen)
        assert missing <= MOST_LENT * (count - len(chosen))
