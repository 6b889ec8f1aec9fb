"""The network's output: lengths, ascending, the same for a prompt alone and among others."""

import numpy as np
import torch

from services.predictor.core.curve import LEVELS
from services.predictor.core.features import features_of
from services.predictor.models.network import Ensemble, lengths_of
from shared.messages.sequence import pack_tokens


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
