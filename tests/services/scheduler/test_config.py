"""The scheduler's settings reach its core."""

import pytest

from services.scheduler.config import SchedulerConfig
from shared.config import load
from shared.errors import ConfigError


def test_settings_become_rules() -> None:
    config = load(
        SchedulerConfig,
        "scheduler",
        ["--token-budget", "128"],
        {"KVASIR_SCHEDULER__MAX_STEPS": "3", "KVASIR_SCHEDULER__CHUNKED_PREFILL": "false"},
    )
    rules = config.rules()
    assert (rules.settings.token_budget, rules.settings.chunked_prefill, rules.settings.max_steps) == (
        128,
        False,
        3,
    )
    assert rules.worker_timeout_s == config.worker_timeout_s == 2.0
    assert rules.settings.start_tokens * 4 <= rules.max_start_bytes


def test_options_of_a_policy_have_types_wherever_they_come_from() -> None:
    prefix = "KVASIR_SCHEDULER__POLICY_OPTIONS"
    single = load(SchedulerConfig, "scheduler", [], {f"{prefix}__PAD": "0.2", f"{prefix}__LENGTH": "p80"})
    assert single.policy_options == {"pad": 0.2, "length": "p80"}
    whole = load(SchedulerConfig, "scheduler", [], {prefix: '{"pad": 0.2, "slack_edges_s": [0.2, 2]}'})
    assert whole.policy_options == {"pad": 0.2, "slack_edges_s": [0.2, 2]}


def test_a_budget_below_the_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="token_budget"):
        load(SchedulerConfig, "scheduler", ["--token-budget", "32"], {})
