"""From fields to `Sampling`: defaults that do nothing, ends that are merged, refusals that name the field."""

from typing import Any

import pytest

from services.gateway.openai.admission import sampling_of
from services.gateway.openai.schemas import ChatRequest, TextRequest, parse
from services.gateway.text.tokenizer import Codec
from shared.errors import InvalidRequest
from shared.messages.sequence import Sampling

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(codec: Codec, **fields: Any) -> Sampling:
    request = parse(ChatRequest, {"model": "m", "messages": MESSAGES, **fields})
    return sampling_of(request, codec, 7, 20)


def test_what_is_not_asked_for_does_nothing(codec: Codec) -> None:
    assert chat(codec) == Sampling(seed=7, max_tokens=20, end_token_ids=(2,))
    neutral = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_p": 0}
    nothing = {"min_tokens": 0, "stop_token_ids": [], "logprobs": False, "top_logprobs": 0}
    assert chat(codec, **neutral, **nothing) == chat(codec)
    assert chat(codec, **dict.fromkeys((*neutral, *nothing))) == chat(codec)


def test_everything_is_carried(codec: Codec) -> None:
    penalties = {"presence_penalty": -1.5, "frequency_penalty": 2, "repetition_penalty": 1.2}
    sampling = chat(codec, **penalties, min_p=0.1, min_tokens=20, logprobs=True, top_logprobs=20)
    assert {name: getattr(sampling, name) for name in penalties} == penalties
    assert (sampling.min_p, sampling.min_tokens, sampling.top_logprobs) == (0.1, 20, 20)


def test_stop_tokens_join_the_ends_and_outlive_ignore_eos(codec: Codec) -> None:
    assert chat(codec, stop_token_ids=[9, 2, 9]).end_token_ids == (2, 9)
    assert chat(codec, stop_token_ids=[9], ignore_eos=True).end_token_ids == (9,)
    assert chat(codec, ignore_eos=True).end_token_ids == ()


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0)]
    + [({"logprobs": True, "top_logprobs": top}, top) for top in (0, 20)],
)
def test_logprobs_of_a_chat(codec: Codec, fields: dict[str, Any], wanted: int | None) -> None:
    assert chat(codec, **fields).top_logprobs == wanted


@pytest.mark.parametrize("wanted", [None, 0, 5])
def test_logprobs_of_a_completion(codec: Codec, wanted: int | None) -> None:
    request = parse(TextRequest, {"model": "m", "prompt": "x", "logprobs": wanted})
    assert sampling_of(request, codec, 7, 20).top_logprobs == wanted


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"min_tokens": 21}, "min_tokens"), ({"stop_token_ids": [5, 99999]}, "stop_token_ids")],
)
def test_what_cannot_be_is_refused_by_name(codec: Codec, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(codec, **fields)
    assert caught.value.param == param
