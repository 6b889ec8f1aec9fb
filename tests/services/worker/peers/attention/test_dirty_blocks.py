"""Copies count until the step that writes to what they were made of."""

import numpy as np

from services.worker.engine.layout import Span
from services.worker.engine.partition import Homes, split
from services.worker.peers.attention.dirty_blocks import WriteWatch

BLOCK_TOKENS = 4


def test_a_written_block_is_no_copy_any_more() -> None:
    homes = Homes(2)
    homes.place([10, 11, 12], 1, [5, 6, 7])
    watch = WriteWatch(BLOCK_TOKENS)
    watch.restart({(1, 5): 0, (1, 6): 1})
    assert watch.is_copy((1, 5), 0) and not watch.is_copy((1, 5), 1) and not watch.is_copy((1, 7), 2)
    parts = split([Span(5, 1, [10, 11]), Span(0, 4, [12])], homes, BLOCK_TOKENS)
    assert sum(int(np.count_nonzero(part.spans.slots >= 0)) for part in parts) == 5
    watch.on_step(parts)
    assert watch.is_copy((1, 5), 0), "it was only read"
    assert not watch.is_copy((1, 6), 1), "position 5 is in it"


def test_a_new_round_forgets_the_last() -> None:
    watch = WriteWatch(BLOCK_TOKENS)
    watch.restart({(1, 5): 0})
    watch.restart({(1, 6): 0})
    assert not watch.is_copy((1, 5), 0) and watch.is_copy((1, 6), 0)
