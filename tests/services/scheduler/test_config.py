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


def test_a_budget_below_the_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="token_budget"):
        load(SchedulerConfig, "scheduler", ["--token-budget", "32"], {})
