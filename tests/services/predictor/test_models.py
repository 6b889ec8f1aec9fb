"""Models by name: built in, and from an installed package's entry points."""

import sys
from pathlib import Path

import pytest

from services.predictor.models import ConstantModel, create, model_names
from shared.errors import ConfigError

PACKAGE = """
from services.predictor.models import ConstantModel

def fives(settings):
    return ConstantModel(5)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution that declares models, as pip would have laid it out."""
    (tmp_path / "kvasir_fives.py").write_text(PACKAGE)
    info = tmp_path / "kvasir_fives-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvasir-fives\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kvasir.predictor.models]\n"
        "fives = kvasir_fives:fives\n"
        "constant = kvasir_fives:fives\n"
        "broken = kvasir_fives:missing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "kvasir_fives", raising=False)


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
