"""Features that are not there: refused by name, but not when the value asks for nothing."""

from typing import Any

import pytest

from services.gateway.errors import UnsupportedFeature
from services.gateway.openai.fields import ELSEWHERE, IGNORED, REFUSED, refuse_unsupported

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
    assert set(ASKED) == set(REFUSED) - ELSEWHERE
    assert not set(REFUSED) & IGNORED and set(REFUSED) > ELSEWHERE


@pytest.mark.parametrize("name", sorted(ASKED))
def test_asking_for_it_is_refused_by_name_and_asking_for_nothing_is_fine(name: str) -> None:
    with pytest.raises(UnsupportedFeature, match=REFUSED[name][1] or "leave it out") as caught:
        refuse_unsupported({"user": "u", name: ASKED[name]})
    assert caught.value.param == name
    for value in (None, *NOTHING.get(name, [])):
        refuse_unsupported({name: value})
