"""Models by name: built in, and from an installed package's entry points."""

from pathlib import Path

import pytest

from services.predictor.models import ConstantModel, create, model_names
from shared.errors import ConfigError
from tests.installed import install

PACKAGE = """
from services.predictor.models import ConstantModel

def fives(settings):
    return ConstantModel(5)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution that declares models."""
    points = {"fives": "fives", "constant": "fives", "broken": "missing"}
    install(tmp_path, monkeypatch, "kvasir_fives", PACKAGE, "kvasir.predictor.models", points)


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"constant, histogram, lm_head, oracle, regressor") as error:
        create("regresor")
    assert error.value.param == "model"


def test_an_installed_package_adds_a_model_but_takes_over_none(installed: None) -> None:
    assert "fives" in model_names()
    assert create("fives").predict(b"", max_tokens=100).p50_tokens == 5
    constant = create("constant")
    assert isinstance(constant, ConstantModel) and constant.length_tokens == 128


def test_a_broken_entry_point_is_a_configuration_error(installed: None) -> None:
    with pytest.raises(ConfigError, match="kvasir_fives:missing"):
        create("broken")
