"""Policies by name, and the settings and options that reach them."""

from pathlib import Path

import pytest

from services.scheduler.config import SchedulerConfig
from services.scheduler.policy import BUILT_IN, check_policy, find_policy, policy_names
from services.scheduler.policy.contract import BatchPolicy, PolicySettings, WorkerShape
from services.scheduler.policy.options import two_queue_options
from shared.config import load
from shared.errors import ConfigError
from tests.installed import install

PACKAGE = """
from services.scheduler.policy.first_come import VllmPolicy

class Patient(VllmPolicy):
    pass
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution that declares policies."""
    points = {"patient": "Patient", "vllm": "Patient", "broken": "Missing"}
    install(tmp_path, monkeypatch, "kvasir_patience", PACKAGE, "kvasir.scheduler.policies", points)


def test_an_unknown_name_is_a_configuration_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="vllm") as error:
        find_policy("vlm")
    assert error.value.param == "policy"


def test_an_installed_package_adds_a_policy(installed: None) -> None:
    assert {"patient", "vllm", "broken"} <= set(policy_names())
    policy = find_policy("patient")(WorkerShape(4, 8), PolicySettings())
    assert isinstance(policy, BatchPolicy) and type(policy).__name__ == "Patient"
    assert find_policy("vllm") is BUILT_IN["vllm"], "a name that is built in cannot be taken over"
    with pytest.raises(ConfigError, match="kvasir_patience:Missing"):
        find_policy("broken")


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_policy_refuses_an_option_that_it_does_not_have_and_names_those_it_has(name: str) -> None:
    check_policy(name, PolicySettings())
    with pytest.raises(ConfigError, match=r"'levles'.*(it has|known): \w+"):
        check_policy(name, PolicySettings(options={"levles": 3}))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ecoserve", {"pad": "much"}),
        ("fastgen", {"tfs_tokens": 0}),
        ("fastserve", {"levels": 2.5}),
        ("kvasir", {"slack_edges_s": [2, 1]}),
        ("sync_coupled", {"group_tokens": True}),
    ],
)
def test_an_option_of_a_wrong_type_or_size_is_refused_by_name(name: str, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        check_policy(name, PolicySettings(options=options))


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


def test_settings_become_rules() -> None:
    config = load(
        SchedulerConfig,
        "scheduler",
        ["--token-budget", "128"],
        {"KVASIR_SCHEDULER__MAX_STEPS": "3", "KVASIR_SCHEDULER__CHUNKED_PREFILL": "false"},
    )
    rules = config.rules()
    chosen = rules.settings
    assert (chosen.token_budget, chosen.chunked_prefill, chosen.max_steps) == (128, False, 3)
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
