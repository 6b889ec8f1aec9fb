"""What policies let be set: known names, values that can be used, defaults."""

import pytest

from services.scheduler.policy.contract import read_options
from services.scheduler.policy.options import TwoQueueOptions, two_queue_options
from shared.errors import ConfigError


def test_defaults_and_overrides() -> None:
    assert two_queue_options("p", {}) == TwoQueueOptions()
    options = two_queue_options(
        "p", {"pad": 0.2, "slack_edges_s": [1, 2], "length": "p90", "tfs_tokens": 256}
    )
    assert (options.pad, options.slack_edges_s, options.length, options.tfs_tokens) == (
        0.2,
        (1.0, 2.0),
        "p90",
        256,
    )
    assert two_queue_options("p", {"pad": 0.3}, {"pad": 0.0, "aging_s": 5.0}) == TwoQueueOptions(
        pad=0.3, aging_s=5.0
    )


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("pad", -0.1, "from 0 to 10"),
        ("pad", "much", "number"),
        ("pad", True, "number"),
        ("pad", float("nan"), "number"),
        ("reserve_ratio", 0.9, "from 0 to 0.5"),
        ("tfs_tokens", 1.5, "whole number"),
        ("default_tokens", 0, "at least 1"),
        ("length", "p99", "mean, p50"),
        ("slack_edges_s", [2, 1], "ascending"),
        ("slack_edges_s", [], "ascending"),
        ("slack_edges_s", 3, "ascending"),
        ("paddle", 1, "it has: aging_s"),
    ],
)
def test_a_wrong_option_is_named(name: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        two_queue_options("p", {name: value})
    assert error.value.param == "policy_options" and name in error.value.message


DEFAULTS = {"levels": 5, "starve_s": 10.0}


def test_what_is_not_set_has_its_default() -> None:
    assert read_options("p", {"starve_s": 3}, DEFAULTS) == {"levels": 5, "starve_s": 3.0}


@pytest.mark.parametrize(
    "options",
    [{"levels": 2.5}, {"levels": 0}, {"starve_s": "long"}, {"levels": True}, {"starve_s": float("nan")}],
)
def test_a_value_that_cannot_be_used_is_a_configuration_error(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        read_options("p", options, DEFAULTS)


def test_an_unknown_name_is_a_configuration_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'level'.*levels, starve_s"):
        read_options("p", {"level": 3}, DEFAULTS)
