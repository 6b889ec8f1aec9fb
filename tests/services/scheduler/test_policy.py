"""Policies by name: built in, and from an installed package's entry points."""

from pathlib import Path

import pytest

from services.scheduler.policy import BUILT_IN, check_policy, find_policy, policy_names
from services.scheduler.policy.contract import BatchPolicy, PolicySettings, WorkerShape
from services.scheduler.policy.first_come import VllmPolicy
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


def test_a_built_in_policy_is_found_and_fulfils_the_contract() -> None:
    policy = find_policy("vllm")(WorkerShape(4, 8), PolicySettings())
    assert isinstance(policy, BatchPolicy)


def test_an_unknown_name_is_a_configuration_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="vllm") as error:
        find_policy("vlm")
    assert error.value.param == "policy"


def test_an_installed_package_adds_a_policy(installed: None) -> None:
    assert {"patient", "vllm", "broken"} <= set(policy_names())
    policy = find_policy("patient")(WorkerShape(4, 8), PolicySettings())
    assert isinstance(policy, BatchPolicy) and type(policy).__name__ == "Patient"


def test_a_built_in_name_cannot_be_taken_over(installed: None) -> None:
    assert find_policy("vllm") is VllmPolicy


def test_a_broken_entry_point_is_a_configuration_error(installed: None) -> None:
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
def test_an_option_of_the_wrong_type_or_size_is_refused_by_name(
    name: str, options: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        check_policy(name, PolicySettings(options=options))
