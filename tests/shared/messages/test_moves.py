"""The contract of every message in `shared.messages.moves`."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages import moves
from tests.shared.messages.contract import check_contract, message_types, values_of


@pytest.mark.parametrize("message_type", message_types(moves))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_contract(message_type: type[msgspec.Struct], data: st.DataObject) -> None:
    message = data.draw(values_of(message_type))
    check_contract(message)
