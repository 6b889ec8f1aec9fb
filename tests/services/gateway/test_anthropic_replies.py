"""Answers in Anthropic's shape: a call's arguments as the model wrote them."""

import json

import pytest

from services.gateway.anthropic.replies import MessageWriter
from services.gateway.openai.replies import FinishedChoice, Usage
from services.gateway.parts.items import AnswerMessage, ToolCallItem


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
