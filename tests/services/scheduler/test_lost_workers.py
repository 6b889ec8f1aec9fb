"""A worker that is parked by plan had nothing to do: the log does not warn that it is lost."""

import logging

import pytest

from services.scheduler.term import _say_lost
from shared.messages.reports import WorkerLost
from shared.messages.sequence import SequenceRef

REF = SequenceRef(request_id="r", choice=0, attempt=1)


@pytest.mark.parametrize(("refs", "level"), [((), logging.INFO), ((REF,), logging.WARNING)])
def test_only_what_is_missed_is_warned_of(
    refs: tuple[SequenceRef, ...], level: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvasir"):
        _say_lost(WorkerLost(worker_id="worker-3", incarnation=1, refs=refs))
    (record,) = caplog.records
    assert record.levelno == level
    assert ("lost" in record.getMessage()) == bool(refs)
