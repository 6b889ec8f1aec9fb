"""Systematic errors are learned, small ones and single ones are not, and old ones are forgotten."""

from services.scheduler.policy.lengths import Calibration


def test_nothing_is_corrected_before_enough_is_known() -> None:
    calibration = Calibration()
    for _ in range(31):
        calibration.learn(1000, 100)
    assert calibration.factor == 1.0
    calibration.learn(1000, 100)
    assert calibration.factor == 0.25, "bounded"


def test_a_small_error_is_none() -> None:
    calibration = Calibration()
    for number in range(200):
        calibration.learn(100, 90 if number % 2 else 120)
    assert calibration.factor == 1.0


def test_it_forgets() -> None:
    calibration = Calibration()
    for _ in range(500):
        calibration.learn(1000, 500)
    for _ in range(2000):
        calibration.learn(100, 200)
    assert calibration.factor > 1.8


def test_the_default_becomes_what_unpredicted_answers_were() -> None:
    calibration = Calibration()
    assert calibration.default_tokens(512) == 512
    for _ in range(40):
        calibration.learn(None, 80)
    assert calibration.default_tokens(512) == 80 and calibration.factor == 1.0
