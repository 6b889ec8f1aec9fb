"""Features that are not there: refused by name, but not when the value asks for nothing."""

from typing import Any

import pytest

from services.gateway.errors import UnsupportedFeature
from services.gateway.openai.fields import (
    ELSEWHERE,
    IGNORED,
    INSTEAD,
    UNSUPPORTED,
    refuse_unsupported,
)

ASKED: dict[str, Any] = {
    "functions": [{}],
    "function_call": {"name": "f"},
    "top_logprobs": 3,
    "best_of": 2,
    "grammar": "root ::= x",
    "logits_processors": ["x"],
    "chat_template": "x",
    "documents": [{}],
    "dimensions": 16,
    "tools": [{}],
    "return_tokens_as_token_ids": True,
    "length_penalty": 0.8,
    "audio": {"voice": "x"},
    "modalities": ["text", "audio"],
    "suffix": "x",
    "echo": True,
    "use_beam_search": True,
    "continue_final_message": True,
    "add_generation_prompt": False,
    "guided_whitespace_pattern": " ",
}
NOTHING: dict[str, list[Any]] = {
    "top_logprobs": [0],
    "modalities": [["text"]],
    "suffix": [""],
    "echo": [False],
    "add_generation_prompt": [True],
}


def test_every_feature_has_a_case() -> None:
    assert set(ASKED) == set(UNSUPPORTED)
    assert not set(UNSUPPORTED) & IGNORED


@pytest.mark.parametrize("name", sorted(ASKED))
def test_asking_for_it_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedFeature, match=name) as caught:
        refuse_unsupported({"user": "u", name: ASKED[name]})
    assert caught.value.param == name


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_asking_for_nothing_is_fine(name: str) -> None:
    for value in (None, *NOTHING.get(name, [])):
        refuse_unsupported({name: value})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("functions", "send them as tools"),
        ("suffix", "leave it out"),
    ],
)
def test_a_refusal_says_what_to_do(name: str, said: str) -> None:
    with pytest.raises(UnsupportedFeature, match=said):
        refuse_unsupported({name: ASKED[name]})


def test_advice_is_for_what_is_refused() -> None:
    assert set(INSTEAD) <= {*UNSUPPORTED, *ELSEWHERE}
