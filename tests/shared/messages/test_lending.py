"""The contract of every message in `shared.messages.lending`, and that the bounds fit the bus."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages import lending
from shared.messages.base import encode
from tests.shared.messages.contract import check_contract, message_types, values_of

NATS_DEFAULT_PAYLOAD_BYTES = 1 << 20


@pytest.mark.parametrize("message_type", message_types(lending))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_contract(message_type: type[msgspec.Struct], data: st.DataObject) -> None:
    message = data.draw(values_of(message_type))
    check_contract(message)


def test_the_largest_grant_fits_into_a_message() -> None:
    grant = lending.Grant(
        creditor_id="w" * 64,
        creditor_incarnation=2**62,
        grant_id=2**62,
        generation=2**62,
        blocks=tuple(range(2**31 - lending.MOST_GRANT_BLOCKS, 2**31)),
        lease_s=5.0,
    )
    assert len(encode(grant)) < 0.9 * NATS_DEFAULT_PAYLOAD_BYTES
