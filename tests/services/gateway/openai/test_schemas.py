"""Request bodies: what is taken, and which field an error names."""

from typing import Any

import pytest

from services.gateway.errors import UnsupportedFeature
from services.gateway.openai import schemas
from services.gateway.openai.fields import ELSEWHERE, IGNORED, REFUSED, refuse_unsupported
from shared.errors import InvalidRequest

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> schemas.ChatRequest:
    return schemas.parse(schemas.ChatRequest, {"model": "m", "messages": MESSAGES, **fields})


def text(**fields: Any) -> schemas.TextRequest:
    return schemas.parse(schemas.TextRequest, {"model": "m", "prompt": "p", **fields})


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), ("", [""]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_the_four_forms_of_a_prompt(prompt: Any, prompts: Any) -> None:
    assert text(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", [None, 5, {}, [], [[]], [1, "a"], [[1], "a"], [True], [1.5], [["a"]]])
def test_prompts_of_no_form(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        text(prompt=prompt)
    assert caught.value.param == "prompt"
    assert "Value error" not in caught.value.message


OUT_OF_RANGE: dict[str, list[Any]] = {
    "model": [None, 5],
    "n": [0, 129, 1.5],
    "temperature": [-0.1, 2.1, "1"],
    "top_p": [1.1],
    "top_k": [-2],
    "max_tokens": [-1],
    "max_completion_tokens": [-1],
    "seed": [2**63, "x"],
    "stop": [["a"] * (schemas.MAX_STOPS + 1), {}],
    "stream": ["yes"],
    "stream_options": [{"include_usage": True}],
    "presence_penalty": [2.1],
    "frequency_penalty": [-2.1],
    "repetition_penalty": [0, 101],
    "min_p": [-0.1, 1.1],
    "min_tokens": [-1],
    "stop_token_ids": [5, [5] * 129],
    "logprobs": [1],
    "top_logprobs": [1],
    "messages": [[], "hi"],
}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(({name: value}, name) for name, values in OUT_OF_RANGE.items() for value in values),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stream": True, "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
        ({"stop_token_ids": [5, -1]}, "stop_token_ids[1]"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": [*MESSAGES, {"content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content"),
    ],
)
def test_an_error_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert caught.value.message.startswith(param) or param == "stream_options"


def test_messages_for_a_template() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": text} for text in "ab"]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "", "unknown": 1},
    ]
    assert schemas.template_messages(chat(messages=messages).messages) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "ann"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "function", "content": "x", "name": "1"}, "messages[0].role"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages[0].function_call"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{}]}, "messages[0].content[0].type"),
    ],
)
def test_messages_of_unsupported_kinds(message: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedFeature) as caught:
        schemas.template_messages(chat(messages=[message]).messages)
    assert caught.value.param == param


def test_millions_of_wrong_items_cost_one_error() -> None:
    many = [1] * 300_000
    for fields in ({"messages": many}, {"messages": [{"role": "user", "content": many}]}, {"stop": many}):
        with pytest.raises(InvalidRequest):
            chat(**fields)
    assert len(text(prompt=many).prompts[0]) == len(many)


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
