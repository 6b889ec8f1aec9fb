"""A flight recorder keeps the latest, within its bounds, and answers for one request or for everything."""

import itertools

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from shared.messages.recordings import Recorded, TellRecorded
from shared.messages.sequence import SequenceRef
from shared.recorder import Batch, Recorder


def a_recorder(**bounds: int) -> Recorder:
    ticks = itertools.count()
    return Recorder("worker", "worker-0", 7, clock=lambda: float(next(ticks)), **bounds)


def ref(request_id: str) -> SequenceRef:
    return SequenceRef(request_id=request_id, choice=0, attempt=1)


@given(st.lists(st.one_of(st.integers(0, 3), st.lists(st.integers(0, 3), max_size=5)), max_size=60))
def test_bounds_hold_and_the_latest_stays(program: list[int | list[int]]) -> None:
    recorder = a_recorder(most_events=8, most_batches=6, most_rows=12)
    for step in program:
        if isinstance(step, int):
            recorder.note("event", f"r{step}", number=step)
        else:
            recorder.file(0.0, "step", Batch(decodes=tuple(ref(f"r{each}") for each in step)))
    told = recorder.recorded(TellRecorded())
    notes = [event for event in told.events if event.kind == "event"]
    steps = [event for event in told.events if event.kind == "step"]
    expected = [step for step in program if isinstance(step, int)][-8:]
    assert [event.fields["number"] for event in notes] == expected
    assert len(steps) <= 6
    assert sum(len(event.fields["own"]) for event in steps) <= 12 or len(steps) == 1
    filed = [step for step in program if isinstance(step, list)]
    assert [len(event.fields["own"]) for event in steps] == [
        len(step) for step in filed[len(filed) - len(steps) :]
    ]
    assert [event.seq for event in told.events] == sorted(event.seq for event in told.events)


def test_one_request_sees_its_own_events_and_only_sizes_of_others() -> None:
    recorder = a_recorder()
    recorder.note("submitted", "a", prompt_tokens=3)
    recorder.note("submitted", "b", prompt_tokens=9)
    recorder.file(5.0, "step", Batch(((ref("a"), 0, 3),), (ref("b"),), {"step_s": 0.5}))
    recorder.file(6.0, "step", Batch((), (ref("b"),)))
    told = recorder.recorded(TellRecorded(request_id="a"))
    assert [event.kind for event in told.events] == ["submitted", "step"]
    step = told.events[1].fields
    assert step["chunks"] == [(0, 1, 0, 3)]
    assert (step["own"], step["decodes"], step["step_s"]) == ([], 1, 0.5)
    assert "b" not in repr(step)


def test_what_comes_after_a_number_is_told_in_pages_without_a_gap() -> None:
    recorder = a_recorder()
    for number in range(50):
        recorder.note("event", number=number)
    seen: list[int] = []
    since = 0
    while len(seen) < 50:
        told = recorder.recorded(TellRecorded(since_seq=since, most=7))
        seen += [event.fields["number"] for event in told.events]
        assert told.next_seq > since
        since = told.next_seq
    assert seen == list(range(50))


def test_an_answer_fits_a_message() -> None:
    recorder = a_recorder()
    for _ in range(3000):
        recorder.note("event", text="x" * 500)
    told = recorder.recorded(TellRecorded())
    data = msgspec.msgpack.encode(told)
    assert len(data) < 500_000
    assert msgspec.msgpack.decode(data, type=Recorded).events[-1].seq == 3000


def test_noting_costs_little() -> None:
    """So that it may stay on: a hundred thousand events take less than a second, at any load."""
    import time

    recorder = a_recorder()
    began_s = time.process_time()
    for _ in range(100_000):
        recorder.note("submitted", "r", choice=0, attempt=1, prompt_tokens=100)
    assert time.process_time() - began_s < 1.0
