"""Responses that are stored, on a whole stack: found again, gone on with, deleted; or refused by name."""

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.patience import STACK_PATIENCE_S
from tests.stack.running import RunningStack

pytestmark = pytest.mark.stack
ASK, THEN = "Tell me a short story about a dog.", "Thank you! What was it about?"


@pytest.fixture
def client(featured: RunningStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{featured.url}/v1", api_key=featured.key, timeout=STACK_PATIENCE_S) as made:
        yield made


def test_one_is_found_again_and_deleted(client: openai.OpenAI) -> None:
    reply = client.responses.create(model="tiny_chat", input=ASK, max_output_tokens=20, temperature=0)
    again = client.responses.retrieve(reply.id)
    assert again == reply and again.output_text and again.store is True  # type: ignore[attr-defined]
    with client.responses.stream(model="tiny_chat", input=ASK, max_output_tokens=400) as stream:
        streamed = stream.get_final_response()
    assert client.responses.retrieve(streamed.id).output_text == streamed.output_text
    client.responses.delete(reply.id)
    for ask in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="no response"):
            ask(reply.id)
    unstored = client.responses.create(model="tiny_chat", input=ASK, max_output_tokens=4, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    """As it would with all of it sent; also when the first is gone, and from one of both more than once."""
    first = client.responses.create(model="tiny_chat", input=ASK, max_output_tokens=30, temperature=0)
    whole = [
        {"role": "user", "content": ASK},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": THEN},
    ]
    sent = client.responses.create(
        model="tiny_chat",
        input=whole,  # type: ignore[arg-type]
        max_output_tokens=30,
        temperature=0,
    )
    replies = [
        client.responses.create(
            model="tiny_chat",
            input=THEN,
            previous_response_id=first.id,
            max_output_tokens=30,
            temperature=0,
        )
        for _ in range(2)
    ]
    assert {reply.output_text for reply in replies} == {sent.output_text}
    assert replies[0].previous_response_id == first.id
    assert replies[0].usage and sent.usage and replies[0].usage.input_tokens == sent.usage.input_tokens
    client.responses.delete(first.id)
    third = client.responses.create(
        model="tiny_chat", input="Bye.", previous_response_id=replies[0].id, max_output_tokens=4
    )
    assert third.usage and third.usage.input_tokens > sent.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="no response"):
        client.responses.create(model="tiny_chat", input=THEN, previous_response_id=first.id)


def test_where_nothing_is_stored_that_is_said(http: httpx.Client) -> None:
    body = {"model": "tiny_chat", "input": ASK, "max_output_tokens": 4}
    assert http.post("/v1/responses", json=body).json()["store"] is False
    for field in ({"store": True}, {"previous_response_id": "resp_1"}):
        error = http.post("/v1/responses", json={**body, **field}).json()["error"]
        assert error["param"] in field and "gateway.stored_responses" in error["message"]
    for method in ("GET", "DELETE"):
        reply = http.request(method, "/v1/responses/resp_1")
        assert reply.status_code == 404 and "gateway.stored_responses" in reply.text
