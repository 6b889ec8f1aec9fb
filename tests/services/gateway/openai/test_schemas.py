"""Request bodies: what is taken, and which field an error names."""

from typing import Any

import pytest

from services.gateway.errors import UnsupportedFeature
from services.gateway.openai import schemas
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


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 1.5}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"stop": ["a"] * (schemas.MAX_STOPS + 1)}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": {}}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 101}, "repetition_penalty"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": [5, -1]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [5] * 129}, "stop_token_ids"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
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
        {
            "role": "user",
            "name": "ann",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
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
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages[0].content[0].type",
        ),
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
