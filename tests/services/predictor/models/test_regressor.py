"""The regressor: its network, trained versions on disk, and the histogram until there is one."""

from pathlib import Path

import numpy as np
import pytest
import torch

from services.predictor.core.distribution import LEVELS
from services.predictor.core.features import features_of
from services.predictor.core.length_model import LengthQuery, ModelSettings
from services.predictor.models import create, network
from services.predictor.models.network import Ensemble, Trained, lengths_of
from services.predictor.models.regressor import RegressorModel
from shared.errors import ConfigError
from shared.messages.sequence import pack_tokens
from tests.services.predictor.lengths import samples_of


def ensemble(seed: int = 3, members: int = 1) -> Ensemble:
    torch.manual_seed(seed)
    return Ensemble(members).eval()


def test_without_a_version_the_histogram_answers_and_learns() -> None:
    model = RegressorModel()
    for sample in samples_of(100):
        model.observe(sample)
    assert model.version == "histogram-100"
    assert 10 <= model.predict(samples_of(1)[0].prompt, max_tokens=1000).p50_tokens <= 300


def test_a_version_is_adopted_between_two_calls_and_answers_alone_as_in_a_batch() -> None:
    model = RegressorModel()
    queries = [LengthQuery(sample.prompt, 500) for sample in samples_of(5)]
    before = model.predict_batch(queries)
    model.adopt(Trained(ensemble(), 3, {}))
    after = model.predict_batch(queries)
    assert model.version == "regressor-3" and after != before
    assert after == [model.predict(query.prompt, max_tokens=500) for query in queries]
    assert model.predict_batch([]) == []


def test_quantiles_ascend_are_corrected_in_logarithms_and_do_not_depend_on_the_batch() -> None:
    made = ensemble(members=2)
    prompts = [pack_tokens(range(start, start + 9)) for start in range(5)]
    together = lengths_of(made, features_of(prompts))
    assert together.shape == (5, len(LEVELS))
    assert (np.diff(together, axis=1) >= 0).all() and (together >= 1).all()
    alone = np.concatenate([lengths_of(made, features_of([prompt])) for prompt in prompts])
    assert np.allclose(together, alone, rtol=1e-4)
    made.correction.fill_(float(np.log(2.0)))
    assert np.allclose(lengths_of(made, features_of(prompts)), 2 * together, rtol=1e-4)


def test_a_version_is_read_as_it_was_written_and_a_restart_takes_the_latest(tmp_path: Path) -> None:
    assert create("regressor", ModelSettings(state_dir=tmp_path / "new")).version == "histogram-0"
    made = ensemble()
    read = network.read(network.write(tmp_path / "new", made, {"samples": 7}))
    assert (read.number, read.version, read.report) == (1, "regressor-1", {"samples": 7})
    for name, tensor in made.state_dict().items():
        assert bool((read.network.state_dict()[name] == tensor).all())
    for _ in range(3):
        network.write(tmp_path / "new", made, {}, keep=2)
    (tmp_path / "new" / "served.jsonl").write_text("")
    assert [network.number_of(path) for path in network.paths(tmp_path / "new")] == [3, 4]
    assert create("regressor", ModelSettings(state_dir=tmp_path / "new")).version == "regressor-4"


def test_a_damaged_or_foreign_version_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network.write(tmp_path, ensemble(), {})
    newest = network.write(tmp_path, ensemble(4), {})
    newest.write_bytes(newest.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="regressor-000002"):
        network.read(newest)
    found = network.latest(tmp_path)
    assert found is not None and found.number == 1
    monkeypatch.setattr(network, "_LAYOUT", "another")
    path = network.write(tmp_path, ensemble(), {})
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="another release"):
        network.read(path)
