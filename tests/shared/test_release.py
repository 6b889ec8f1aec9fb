"""One release apart is supported, and who is further apart is named once."""

import logging

import pytest

from shared.release import PROTOCOL, ReleaseWatch, works_with


def test_one_release_apart_is_supported() -> None:
    assert [works_with(PROTOCOL + apart) for apart in (-2, -1, 0, 1, 2)] == [False, True, True, True, False]


def test_who_is_too_far_apart_is_named_once_and_again_when_it_has_changed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = ReleaseWatch()
    with caplog.at_level(logging.WARNING):
        told = [
            watch.note("worker-0", protocol)
            for protocol in (PROTOCOL, PROTOCOL + 2, PROTOCOL + 2, PROTOCOL + 3, PROTOCOL + 1)
        ]
    assert told == [False, True, False, True, False]
    assert len(caplog.messages) == 2 and "worker-0" in caplog.messages[0]
