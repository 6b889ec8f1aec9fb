"""`lm_head` with the shipped model as its base, where `peft` is installed."""

from pathlib import Path

import pytest
import torch

from services.predictor.core.length_model import LengthQuery, ModelSettings
from services.predictor.core.report import evaluate
from services.predictor.models import create
from shared.errors import ConfigError
from tests.services.predictor.lengths import samples_of

pytest.importorskip("peft", reason="optional: deploy/requirements/lm-head.txt")
TINY_CHAT = Path(__file__).parents[4] / "models" / "tiny_chat"


@pytest.mark.filterwarnings("ignore")
def test_it_learns_what_decides_the_length_and_a_new_start_loads_it(tmp_path: Path) -> None:
    from services.predictor.models.lm_head import train_lm_head

    torch.set_num_threads(1)
    train_lm_head(samples_of(160), TINY_CHAT, tmp_path)
    model = create("lm_head", ModelSettings(state_dir=tmp_path, base_model=TINY_CHAT))
    assert model.version == "lm_head-1"
    judge = samples_of(40, seed=1)
    report = evaluate(model, judge)
    assert report is not None and report.mae_tokens < 45, "one guess for both is 90 off"
    queries = [LengthQuery(sample.prompt, 1000) for sample in judge[:4]]
    alone = [model.predict(query.prompt, max_tokens=1000) for query in queries]
    together = [one.p50_tokens for one in model.predict_batch(queries)]  # type: ignore[attr-defined]
    assert together == pytest.approx([one.p50_tokens for one in alone], rel=0.05)
    longer = model.predict(judge[0].prompt, max_tokens=1000, generated_tokens=400)
    assert longer.p50_tokens > 400


def test_without_adapter_or_base_it_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="base_model"):
        create("lm_head")
    with pytest.raises(ConfigError, match="train it first"):
        create("lm_head", ModelSettings(state_dir=tmp_path, base_model=TINY_CHAT))
