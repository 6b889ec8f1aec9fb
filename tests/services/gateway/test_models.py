"""Which model a request is for, and which names a gateway may be given."""

from typing import Any

import pytest

from services.gateway.config import GatewayConfig
from services.gateway.http.reading import Models
from services.gateway.openai.admission import Acceptance
from services.gateway.text.tokenizer import Codec
from shared.errors import ConfigError, UnknownModel

TINY_CHAT = "models/tiny_chat"


def config(**fields: Any) -> GatewayConfig:
    return GatewayConfig.model_validate({"served_name": "a", "model": TINY_CHAT, **fields})


@pytest.fixture
def models(codec: Codec) -> Models:
    whole = config(models={"b": TINY_CHAT}, aliases={"gpt": "b"})
    whole.check()
    return Models([Acceptance(each, codec) for each in whole.of_models()])


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"model": "a", "x": [1, {"model": "b"}]}', "a"),
        (b'{"x": {"model": "a"}, "model": "b"}', "b"),
        (b'{"model": "gpt"}', "b"),
        (b'{"messages": []}', "a"),
        (b'{"model": 3}', "a"),
        (b'{"model": "b"', "a"),
        (b"\xff", "a"),
        (b"", "a"),
    ],
)
def test_a_request_is_read_by_whom_it_names_or_else_by_the_first(
    models: Models, body: bytes, name: str
) -> None:
    assert models.of(body).name == name


def test_others_are_refused_with_all_that_there_are(models: Models) -> None:
    assert models.names == ("a", "b", "gpt")
    with pytest.raises(UnknownModel, match="there is 'a', 'b', 'gpt'") as caught:
        models.of(b'{"model": "c"}')
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"models": {"a": TINY_CHAT}}, "models"),
        ({"models": {"b": "/no/such/folder"}}, "model"),
        ({"aliases": {"x": "none"}}, "aliases"),
        ({"aliases": {"a": "a"}}, "aliases"),
        ({"models": {"b": TINY_CHAT}, "aliases": {"b": "a"}}, "aliases"),
    ],
)
def test_names_that_cannot_be_are_said_before_the_start(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**fields).check()
    assert caught.value.param == param
