"""The validator accepts a good body, refuses bad ones; the extract is what the script makes."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.extract import EXTRACT, extract
from tests.conformance.schemas import violations


def chat_reply() -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello.", "refusal": None},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
    }


def test_a_complete_reply_conforms() -> None:
    assert violations("CreateChatCompletionResponse", chat_reply()) == []


@pytest.mark.parametrize("field", ["id", "object", "created", "model", "choices"])
def test_a_missing_field_is_named(field: str) -> None:
    body = chat_reply()
    del body[field]
    assert any(field in line for line in violations("CreateChatCompletionResponse", body))


def test_null_is_refused_where_it_is_not_allowed() -> None:
    body = chat_reply() | {"model": None}
    assert violations("CreateChatCompletionResponse", body) == ["model: None is not of type 'string'"]


def test_an_integer_error_code_is_refused() -> None:
    error = {"message": "m", "type": "t", "param": None, "code": None}
    assert violations("ErrorResponse", {"error": error}) == []
    assert violations("ErrorResponse", {"error": error | {"code": 404}}) != []


def test_the_extract_is_up_to_date() -> None:
    folder = Path(os.environ.get("KVASIR_CONFORMANCE", "../shared/conformance"))
    description = folder / "openai-openapi.json"
    if not description.exists():
        pytest.skip("the whole description is not at hand; the committed extract stands alone")
    assert extract(json.loads(description.read_text())) == json.loads(EXTRACT.read_text())
