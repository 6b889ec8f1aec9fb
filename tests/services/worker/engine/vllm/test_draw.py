"""What is sampled of a step is the same on the other side of a pipe."""

import pickle
from collections.abc import Sequence

import numpy as np
import torch

from services.worker.core.sampling import SamplePoint
from services.worker.engine.grammar_masks import RowMasks
from services.worker.engine.sampler import Logits
from services.worker.engine.vllm.draw import StepDraw
from shared.grammars import Words
from shared.messages.sequence import Sampling

VOCABULARY = 64
TEXT = list(range(40))


def points() -> list[SamplePoint]:
    """Greedy, seeded, penalized, with log-probabilities, constrained."""
    ways: Sequence[dict[str, object]] = (
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.8},
        {"temperature": 0.0, "repetition_penalty": 4.0},
        {"temperature": 1.0, "frequency_penalty": 2.0, "top_logprobs": 2},
        {"temperature": 0.0},
    )
    return [
        SamplePoint(Sampling(seed=index, max_tokens=99, **how), 0, 30, TEXT)  # type: ignore[arg-type]
        for index, how in enumerate(ways)
    ]


def masks() -> RowMasks:
    """The last row may have tokens 5 and 6 only."""

    def find(at: int, words: Words) -> None:
        words[at] = np.uint32(0b1100000)

    return RowMasks([4], VOCABULARY // 32, find)


def test_sent_and_drawn_there() -> None:
    names = [f"row-{index}" for index in range(5)]
    values = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(3))
    order = ["row-3", "chunk", "row-0", "row-4", "row-1", "row-2"]
    here = StepDraw(names, points(), masks())
    there: StepDraw = pickle.loads(pickle.dumps(here))
    tokens = here(Logits(values.clone()), order)
    assert there(Logits(values.clone()), order) == tokens
    assert there.drawn == here.drawn
    assert list(here.drawn) == names
    assert here.noted("chunk") is None and tokens[1] == 0
    assert here.noted("row-4") in (5, 6)
    assert here.noted("row-0") == int(values[2].argmax())


def test_rows_that_want_the_likeliest_alone_have_it_whatever_their_order() -> None:
    """Without a copy of the logits; one that is not finite has none, and one that is to go on does."""
    values = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(4))
    values[2, 7] = float("nan")
    end = int(values[3].argmax())
    goes_on = Sampling(seed=0, max_tokens=99, temperature=0.0, min_tokens=31, end_token_ids=(end,))
    greedy = Sampling(seed=0, max_tokens=99, temperature=0.0)
    order = ["chunk", "b", "a", "c"]
    wanted = {name: SamplePoint(greedy, 0, 30, TEXT) for name in ("a", "b", "c")}
    alone = StepDraw(list(wanted), list(wanted.values()), None)
    tokens = alone(Logits(values.clone()), order)
    assert tokens == [0, int(values[1].argmax()), 0, end]
    assert alone.drawn["a"] is None
    wanted["c"] = SamplePoint(goes_on, 0, 30, TEXT)
    beside = StepDraw(list(wanted), list(wanted.values()), None)
    assert beside(Logits(values.clone()), order)[:3] == tokens[:3]
    assert beside.noted("c") not in (None, end)
