"""Viewers of the live page: bounded queues, and who falls behind is told everything anew."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.ui.watch import QUEUED_PICTURES, Viewer


@given(st.lists(st.booleans(), max_size=60))
def test_a_slow_viewer_costs_bounded_memory_and_resynchronises(reads: list[bool]) -> None:
    """Whatever the order of pictures and reads: what is read after a gap begins with a whole picture."""

    async def play() -> None:
        viewer = Viewer()
        number, last = 0, None
        for is_read in reads:
            if is_read:
                if viewer._pictures.empty():
                    continue
                picture = await viewer.next()
                assert picture is not None
                kind, at = picture.split()
                assert kind == b"whole" or last is None or int(at) == last + 1
                assert last is not None or kind == b"whole"
                last = int(at)
            else:
                number += 1
                is_whole = viewer.needs_whole
                kind = b"whole" if is_whole else b"part"
                viewer.offer(b"%s %d" % (kind, number), is_whole=is_whole)
            assert viewer._pictures.qsize() <= QUEUED_PICTURES

    asyncio.run(play())


async def test_the_end_reaches_a_viewer_whose_queue_is_full() -> None:
    viewer = Viewer()
    for _ in range(QUEUED_PICTURES):
        viewer.offer(b"picture", is_whole=True)
    viewer.end()
    assert await asyncio.wait_for(viewer.next(), 1) is None
