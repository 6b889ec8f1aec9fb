"""Options of the EcoServe family: every wrong one is named, with what to write instead."""

import pytest

from services.scheduler.policy import BUILT_IN
from services.scheduler.policy.contract import PolicySettings, WorkerShape
from services.scheduler.policy.options import TwoQueueOptions, parse_options
from shared.errors import ConfigError


def test_defaults_and_overrides() -> None:
    assert parse_options({}) == TwoQueueOptions()
    options = parse_options({"pad": 0.2, "slack_edges_s": [1, 2], "length": "p90", "tfs_tokens": 256})
    assert (options.pad, options.slack_edges_s, options.length, options.tfs_tokens) == (
        0.2,
        (1.0, 2.0),
        "p90",
        256,
    )
    assert parse_options({"pad": 0.3}, {"pad": 0.0, "aging_s": 5.0}) == TwoQueueOptions(pad=0.3, aging_s=5.0)


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
        ("paddle", 1, "known: aging_s"),
    ],
)
def test_a_wrong_option_is_named(name: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        parse_options({name: value})
    assert error.value.param == name and name in error.value.message


@pytest.mark.parametrize("policy", [name for name in BUILT_IN if name.startswith(("ecoserve", "kvasir"))])
def test_a_policy_is_not_made_with_a_wrong_option(policy: str) -> None:
    with pytest.raises(ConfigError, match="known"):
        BUILT_IN[policy](WorkerShape(4, 8), PolicySettings(options={"paddle": 1}))
