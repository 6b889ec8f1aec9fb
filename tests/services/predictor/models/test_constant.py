"""The constant model."""

from services.predictor.core.length_model import LengthSample
from services.predictor.models import create
from services.predictor.models.constant import ConstantModel


def test_says_the_same_within_what_is_possible() -> None:
    model = ConstantModel(128)
    model.observe(LengthSample(b"", 5, censored=False))
    assert model.predict(b"", max_tokens=500).p95_tokens == 128
    assert model.predict(b"", max_tokens=100).rl_tokens == 100
    assert model.predict(b"", max_tokens=500, generated_tokens=300).rl_tokens == 301


def test_models_are_found_by_name() -> None:
    assert create("constant").name == "constant"
    assert create("histogram").name == "histogram"
