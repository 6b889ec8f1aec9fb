"""The contract of every message in `shared.messages.prefixes`, and that the bounds fit the bus."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.blocks import HASH_BYTES
from shared.messages import prefixes
from shared.messages.base import encode
from tests.shared.messages.contract import check_contract, message_types, values_of

NATS_DEFAULT_PAYLOAD_BYTES = 1 << 20


@pytest.mark.parametrize("message_type", message_types(prefixes))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_contract(message_type: type[msgspec.Struct], data: st.DataObject) -> None:
    message = data.draw(values_of(message_type))
    check_contract(message)


def test_the_largest_news_fit_into_a_message() -> None:
    most = prefixes.MOST_NEWS_BLOCKS
    news = prefixes.WorkerPrefixes(
        worker_id="w" * 64, incarnation=2**62, seq=2**62, added=bytes(most * HASH_BYTES), tiers=bytes(most)
    )
    assert len(encode(news)) < 0.9 * NATS_DEFAULT_PAYLOAD_BYTES
