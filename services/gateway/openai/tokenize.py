"""POST /tokenize and /detokenize in vLLM's format: a text or chat to ids, and ids to text. Text made from ids
includes special tokens."""

from collections.abc import Mapping
from typing import Annotated, Any

import orjson
from pydantic import FailFast, Field

from services.gateway.errors import UnsupportedFeature, unknown_model
from services.gateway.openai import schemas
from services.gateway.openai.admission import Acceptance
from services.gateway.openai.fields import ELSEWHERE, Ignored, refuse_unsupported
from services.gateway.openai.schemas import parse_chat, parse_object
from services.gateway.openai.tools import tools_of
from services.gateway.text.choice_text import decode
from shared.errors import InvalidRequest

MAX_DETOKENIZED_TOKENS = 131_072
"""Limit per request: decoding this many holds the interpreter lock for 0.1 s."""


class _Fields(schemas.StrictModel):
    model: str | None = None


class TokenizeText(_Fields):
    """Tokenizes `prompt` as /v1/completions does."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChat(_Fields):
    """Tokenizes `messages` as /v1/chat/completions does."""

    messages: Annotated[list[schemas.RequestMessage], FailFast()] = Field(min_length=1)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    return_token_strs: bool | None = None
    tools: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeTokens(_Fields):
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], FailFast()] = Field(
        max_length=MAX_DETOKENIZED_TOKENS
    )


async def tokenized(model: Acceptance, body: bytes, max_model_len: int) -> bytes:
    """Return `{count, max_model_len, tokens, token_strs}` as JSON. Raises InvalidRequest, Overloaded."""
    fields = await model.threads.read(lambda: parse_chat(body, model.config.max_messages), len(body))
    tokens = await model.threads.encode(lambda: _encoded(model, fields), len(body))
    texts = None
    if fields.get("return_token_strs") is True:
        texts = [model.vocabulary.text(token) for token in tokens]
    counts = {"count": len(tokens), "max_model_len": max_model_len}
    return orjson.dumps({**counts, "tokens": tokens, "token_strs": texts})


async def detokenized(model: Acceptance, body: bytes) -> bytes:
    """Return `{prompt}` as JSON. Raises as `tokenized` does."""

    def decoded() -> str:
        request = schemas.validated(DetokenizeTokens, parse_object(body))
        _check(model, request)
        if max(request.tokens, default=0) >= model.codec.vocab_size:
            raise InvalidRequest(f"token ids are from 0 to {model.codec.vocab_size - 1}", param="tokens")
        return decode(model.codec.tokenizer, request.tokens, shows_special=True)

    return orjson.dumps({"prompt": await model.threads.read(decoded, len(body))})


def _encoded(model: Acceptance, body: Mapping[str, Any]) -> list[int]:
    if "messages" not in body:
        text = schemas.validated(TokenizeText, body)
        _check(model, text)
        return model.codec.encode_text(text.prompt, add_special_tokens=text.add_special_tokens)
    if body.get("prompt") is not None:
        raise InvalidRequest("prompt and messages exclude each other", param="prompt")
    chat = schemas.validated(TokenizeChat, body)
    _check(model, chat)
    if chat.add_special_tokens:
        why = "add_special_tokens with messages is not supported: the chat template adds them"
        raise UnsupportedFeature(why, param="add_special_tokens")
    schemas.check_continued(chat.continue_final_message, chat.add_generation_prompt)
    rendered = model.rendered(
        schemas.template_messages(chat.messages),
        tools_of(chat.tools, None, None, Ignored()),
        chat.chat_template_kwargs or {},
        add_generation_prompt=chat.add_generation_prompt is not False,
        continues_last=chat.continue_final_message,
    )
    return model.codec.encode_text(rendered, add_special_tokens=False)


def _check(model: Acceptance, request: _Fields) -> None:
    if request.model is not None and request.model not in model.names:
        raise unknown_model(request.model, model.names)
    refuse_unsupported(request.model_extra or {}, but=ELSEWHERE)
