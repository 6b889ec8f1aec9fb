"""The contract of every message in `shared.messages.reports`."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages import reports
from tests.shared.messages.contract import (
    check_contract,
    message_types,
    values_of,
)


@pytest.mark.parametrize("message_type", message_types(reports))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_contract(message_type: type[msgspec.Struct], data: st.DataObject) -> None:
    message = data.draw(values_of(message_type))
    check_contract(message)


@pytest.mark.parametrize(
    ("free", "evictable", "doomed", "plannable"), [(5, 0, 0, 5), (5, 3, 0, 8), (5, 3, 6, 2), (1, 0, 4, 0)]
)
def test_what_a_plan_may_count_on(free: int, evictable: int, doomed: int, plannable: int) -> None:
    capacity = reports.Capacity(
        total_blocks=10, free_blocks=free, evictable_blocks=evictable, doomed_blocks=doomed, lent_blocks=2
    )
    assert capacity.plannable_blocks == plannable
