"""A timing is of real steps."""

import pytest

from services.worker.engine.native import build, timings


@pytest.mark.skipif(build.find_compiler() is None, reason="there is no C++ compiler")
def test_a_measurement_is_of_a_step_and_of_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "_ROUNDS", 2)
    step_ms, read_ms = timings._measure((2, 2, 4, 64), 2, 40, "native")
    assert 0 < step_ms < 1e4 and 0 <= read_ms < 1e4
