"""Answers in Anthropic's shape: a call's arguments as the model wrote them."""

import json

import pytest

from services.gateway.anthropic import MessageWriter, parse_messages
from services.gateway.openai.fields import Ignored
from services.gateway.openai.replies import FinishedChoice, Usage
from services.gateway.parts.items import AnswerMessage, ToolCallItem
from shared.errors import InvalidRequest


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ('{"id": 1234567890123456789012345}', '{"id": 1234567890123456789012345}'),
        ('{"x": [1.10, 1e400, -0]}', '{"x": [1.10, 1e400, -0]}'),
        ("[9007199254740993]", '{"arguments":[9007199254740993]}'),
        ('{"x": NaN}', '{"arguments":"{\\"x\\": NaN}"}'),
        ("", "{}"),
    ],
)
def test_numbers_in_arguments_keep_their_digits(arguments: str, written: str) -> None:
    """Keeps an id beyond 64 bits from being a server error, and any other from becoming a double."""
    message = AnswerMessage(calls=[ToolCallItem("f", arguments)])
    whole = MessageWriter("msg_1", "m", 1).whole([FinishedChoice(0, message, "stop")], Usage(1, 1, 0))
    assert f'"input":{written}'.encode() in whole
    json.loads(whole)


@pytest.mark.parametrize("number", [-(2**63) - 1, 2**64, 1234567890123456789012345])
def test_numbers_in_the_history_keep_their_digits(number: int) -> None:
    """Keeps an id beyond 64 bits, sent back in `tool_use`, from becoming a double."""
    used = {"type": "tool_use", "id": "c", "name": "f", "input": {"id": [number, 0.5]}}
    messages = [{"role": "assistant", "content": [used]}, {"role": "user", "content": "x"}]
    body = json.dumps({"model": "m", "max_tokens": 9, "messages": messages})
    chat = parse_messages(body.encode(), 10, Ignored())
    called = chat["messages"][0]["tool_calls"][0]["function"]
    assert called["arguments"] == json.dumps(used["input"])
    deep = body.replace(str(number), f"{'[' * 1000}{number}{']' * 1000}")
    with pytest.raises(InvalidRequest, match="nested too deeply") as caught:
        parse_messages(deep.encode(), 10, Ignored())
    assert caught.value.param == "messages"
