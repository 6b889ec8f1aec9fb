"""Bodies as OpenAI's schema has them, with nothing optional in them that is null."""

import json
from typing import Any

from services.gateway.openai.replies import FinishedChoice, Letterhead, Usage, error_event, model_body
from shared.errors import Overloaded
from tests.conformance.schemas import violations

CHAT = Letterhead("chat", "chatcmpl-1", 1_700_000_000, "m")
TEXT = Letterhead("text", "cmpl-1", 1_700_000_000, "m")
USAGE = Usage(prompt_tokens=5, completion_tokens=7, cached_tokens=2)
COUNTS = {
    "prompt_tokens": 5,
    "completion_tokens": 7,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 2},
}


def event(data: bytes) -> Any:
    assert data.startswith(b"data: ") and data.endswith(b"\n\n") and data.count(b"\n") == 2
    return json.loads(data.removeprefix(b"data: "))


def test_a_whole_chat() -> None:
    body = json.loads(
        CHAT.whole([FinishedChoice(0, "hi\n😀", "stop"), FinishedChoice(1, "", "length")], USAGE)
    )
    assert violations("CreateChatCompletionResponse", body) == []
    assert set(body) == {"id", "object", "created", "model", "choices", "usage"}
    assert body["usage"] == COUNTS
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "hi\n😀", "refusal": None}


def test_chat_events() -> None:
    first = event(CHAT.role_event(1))
    assert first["choices"] == [
        {"index": 1, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    ]
    middle = event(CHAT.text_event(1, "a\nb", None))
    assert middle["choices"] == [{"index": 1, "delta": {"content": "a\nb"}, "finish_reason": None}]
    last = event(CHAT.text_event(1, "", "stop"))
    assert last["choices"] == [{"index": 1, "delta": {}, "finish_reason": "stop"}]
    usage = event(CHAT.usage_event(USAGE))
    assert (usage["choices"], usage["usage"]) == ([], COUNTS)
    for body in (first, middle, last, usage):
        assert body["object"] == "chat.completion.chunk"
        assert violations("CreateChatCompletionStreamResponse", body) == []


def test_completions_have_one_object_streamed_or_not() -> None:
    whole = json.loads(TEXT.whole([FinishedChoice(0, "x", "length")], USAGE))
    piece = event(TEXT.text_event(0, "x", None))
    last = event(TEXT.text_event(0, "", "stop"))
    assert TEXT.role_event(0) == b""
    assert whole["object"] == piece["object"] == "text_completion"
    for body in (whole, last):
        assert violations("CreateCompletionResponse", body) == []
    assert piece["choices"] == [{"index": 0, "text": "x", "logprobs": None, "finish_reason": None}]


def test_an_error_event_is_the_error_body() -> None:
    assert violations("ErrorResponse", event(error_event(Overloaded("full")))) == []


def test_models() -> None:
    assert violations("Model", model_body("m", 1, None)) == []
    assert "max_model_len" not in model_body("m", 1, None)
    assert model_body("m", 1, 4096)["max_model_len"] == 4096


def test_a_plain_piece_has_the_bytes_of_a_general_one() -> None:
    for kind, model in (("chat", 'a "" b'), ("text", 'm","text":""')):
        head = Letterhead("chat" if kind == "chat" else "text", "id-1", 5, model)
        for index, text in ((0, "x"), (3, 'quote " and \\ and \n'), (0, '""'), (3, "é😀\u2028")):
            if kind == "chat":
                choice: dict[str, Any] = {"index": index, "delta": {"content": text}, "finish_reason": None}
            else:
                choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
            assert head.text_event(index, text, None) == head._event([choice])
