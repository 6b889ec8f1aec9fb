"""`multires`: the demand closest to what is free starts."""

from math import hypot

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.policy.contract import PolicySettings
from services.scheduler.policy.research.multires import MultiResPolicy
from tests.services.scheduler.policy.batch_rig import rig

BUDGET, BLOCKS = 64, 40


def first_started(demands: list[tuple[int, int]]) -> str:
    bench = rig(MultiResPolicy, PolicySettings(token_budget=BUDGET, max_steps=1), blocks=BLOCKS, lag=0)
    for number, (prompt, length) in enumerate(demands):
        bench.arrive(f"{number:02}", prompt, length, length, length)
    bench.turn()
    return bench.batches[0].prefills[0].key[0]


def test_it_prefers_what_uses_both_over_what_uses_one() -> None:
    assert first_started([(60, 5), (8, 150), (50, 100)]) == "02"


@settings(max_examples=100, deadline=None)
@given(demands=st.lists(st.tuples(st.integers(1, 64), st.integers(1, 90)), min_size=1, max_size=12))
def test_the_first_is_nearly_as_close_as_the_closest(demands: list[tuple[int, int]]) -> None:
    def distance(prompt: int, length: int) -> float:
        blocks = -(-(prompt + length - 1) // 4)
        return hypot(1 - prompt / BUDGET, 1 - blocks / BLOCKS)

    chosen = distance(*demands[int(first_started(demands))])
    row_width_share = 2**0.25 - 1
    assert chosen <= min(distance(*demand) for demand in demands) + row_width_share


def test_another_one_starts_as_long_as_one_fits() -> None:
    bench = rig(MultiResPolicy, PolicySettings(token_budget=BUDGET, max_steps=1), blocks=BLOCKS, lag=0)
    for number, (prompt, length) in enumerate([(30, 60), (30, 60), (4, 5)]):
        bench.arrive(f"{number}", prompt, length, length, length)
    bench.turn()
    assert [item.key[0] for item in bench.batches[0].prefills] == ["0", "2"], "the second pair does not fit"
    bench.finish()
