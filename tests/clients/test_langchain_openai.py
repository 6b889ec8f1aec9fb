"""langchain-openai: two streamed turns, a chain, and our errors as the types it documents."""

from typing import Any

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

from tests.clients.chats import FIRST, MAX_TOKENS, OVERLONG, SECOND, UNKNOWN_MODEL, WRONG_KEY
from tests.clients.serving import Serving


def chat(stack: Serving, **fields: Any) -> ChatOpenAI:
    settings = {
        "model": stack.model,
        "base_url": stack.base_url,
        "api_key": stack.key,
        "max_tokens": MAX_TOKENS,
        "max_retries": 0,
        "temperature": 0,
        "stream_usage": True,
    }
    return ChatOpenAI(**settings | fields)


def test_two_streamed_turns(stack: Serving) -> None:
    model = chat(stack)
    messages: list[BaseMessage] = [SystemMessage("You are brief.")]
    for text in (FIRST, SECOND):
        messages.append(HumanMessage(text))
        chunks = list(model.stream(messages))
        assert len([chunk for chunk in chunks if chunk.content]) > 1
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole += chunk
        assert isinstance(whole, AIMessageChunk) and str(whole.content).strip()
        assert whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] > 1
        assert whole.response_metadata["finish_reason"] in ("stop", "length")
        messages.append(whole)


def test_a_chain_streams_the_same_text_that_it_returns_whole(stack: Serving) -> None:
    prompt = ChatPromptTemplate.from_messages([("user", "Tell me a short story about a {animal}.")])
    chain = prompt | chat(stack) | StrOutputParser()
    parts = list(chain.stream({"animal": "dog"}))
    assert len(parts) > 1 and "".join(parts) == chain.invoke({"animal": "dog"})


@pytest.mark.parametrize("stream", [False, True])
def test_an_overlong_prompt(stack: Serving, stream: bool) -> None:
    model = chat(stack)
    with pytest.raises(ContextOverflowError):
        list(model.stream(OVERLONG)) if stream else model.invoke(OVERLONG)


def test_an_unknown_model(stack: Serving) -> None:
    with pytest.raises(openai.NotFoundError, match=UNKNOWN_MODEL):
        chat(stack, model=UNKNOWN_MODEL).invoke(FIRST)


def test_a_wrong_key(stack: Serving) -> None:
    with pytest.raises(openai.AuthenticationError):
        chat(stack, api_key=WRONG_KEY).invoke(FIRST)


def test_a_field_out_of_range(stack: Serving) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat(stack, temperature=-1).invoke(FIRST)
