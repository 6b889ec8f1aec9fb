"""The regressor: a histogram until it has a version, then the version.

The network's output: lengths, ascending, the same for a prompt alone and among others.
"""

from pathlib import Path

import numpy as np
import torch

from services.predictor.core.distribution import LEVELS
from services.predictor.core.features import features_of
from services.predictor.core.length_model import LengthQuery, ModelSettings
from services.predictor.models import create, versions
from services.predictor.models.network import Ensemble, lengths_of
from services.predictor.models.regressor import RegressorModel
from services.predictor.models.versions import Trained
from shared.messages.sequence import pack_tokens
from tests.services.predictor.lengths import samples_of


def trained(number: int = 3) -> Trained:
    torch.manual_seed(number)
    return Trained(Ensemble(1).eval(), number, {})


def test_without_a_version_the_histogram_answers_and_learns() -> None:
    model = RegressorModel()
    prompt = samples_of(1)[0].prompt
    assert model.version == "histogram-0"
    for sample in samples_of(100):
        model.observe(sample)
    assert model.version == "histogram-100"
    assert 10 <= model.predict(prompt, max_tokens=1000).p50_tokens <= 300


def test_a_version_is_taken_up_between_two_calls_and_answers_alone_as_in_a_batch() -> None:
    model = RegressorModel()
    queries = [LengthQuery(sample.prompt, 500) for sample in samples_of(5)]
    before = model.predict_batch(queries)
    model.adopt(trained())
    after = model.predict_batch(queries)
    assert model.version == "regressor-3" and after != before
    assert after == [model.predict(query.prompt, max_tokens=500) for query in queries]
    assert model.predict_batch([]) == []


def test_a_new_start_goes_on_with_the_latest_version(tmp_path: Path) -> None:
    versions.write(tmp_path, trained().network, {})
    versions.write(tmp_path, trained(4).network, {})
    assert create("regressor", ModelSettings(state_dir=tmp_path)).version == "regressor-2"
    assert create("regressor", ModelSettings(state_dir=tmp_path / "none")).version == "histogram-0"
    assert create("regressor").version == "histogram-0"


def test_quantiles_ascend_and_do_not_depend_on_the_batch() -> None:
    torch.manual_seed(0)
    network = Ensemble(2).eval()
    prompts = [pack_tokens(range(start, start + 9)) for start in range(5)]
    together = lengths_of(network, features_of(prompts))
    assert together.shape == (5, len(LEVELS))
    assert (np.diff(together, axis=1) >= 0).all() and (together >= 1).all()
    alone = np.concatenate([lengths_of(network, features_of([prompt])) for prompt in prompts])
    assert np.allclose(together, alone, rtol=1e-4)


def test_the_correction_is_applied_in_logarithms() -> None:
    torch.manual_seed(0)
    network = Ensemble(1).eval()
    features = features_of([pack_tokens(range(9))])
    before = lengths_of(network, features)
    network.correction.fill_(float(np.log(2.0)))
    assert np.allclose(lengths_of(network, features), 2 * before, rtol=1e-4)
