"""POST /tokenize and /detokenize in vLLM's format: a text or chat to ids, and ids to text.

Text made from ids includes special tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, FailFast, Field

from services.gateway.errors import UnsupportedFeature, unknown_model
from services.gateway.openai import schemas
from services.gateway.openai.fields import refuse_unsupported
from services.gateway.openai.ignored import Ignored
from services.gateway.openai.schemas import parse_chat, parse_object
from services.gateway.openai.tools import chat_text, tools_of
from services.gateway.text.tokenizer import Codec, TokenizerThreads, Vocabulary
from shared.errors import InvalidRequest

MAX_DETOKENIZED_TOKENS = 131_072
"""Limit per request: decoding this many holds the interpreter lock for 0.1 s."""


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="allow", protected_namespaces=())

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


class Tokenization:
    """Tokenization for one model, under any of its names or none."""

    def __init__(
        self,
        names: Sequence[str],
        codec: Codec,
        threads: TokenizerThreads,
        vocabulary: Vocabulary,
        max_messages: int,
    ) -> None:
        self._names = names
        self._codec = codec
        self._threads = threads
        self._vocabulary = vocabulary
        self._max_messages = max_messages

    async def tokenize(self, body: bytes, max_model_len: int) -> bytes:
        """Return `{count, max_model_len, tokens, token_strs}` as JSON. Raises InvalidRequest, Overloaded."""
        fields = await self._threads.read(lambda: parse_chat(body, self._max_messages), len(body))
        return await self._threads.encode(lambda: self._tokenized(fields, max_model_len), len(body))

    async def detokenize(self, body: bytes) -> bytes:
        """Return `{prompt}` as JSON. Raises as `tokenize` does."""
        return await self._threads.read(lambda: self._detokenized(body), len(body))

    def _tokenized(self, fields: Mapping[str, Any], max_model_len: int) -> bytes:
        tokens = self._encode(fields)
        wants_texts = fields.get("return_token_strs") is True
        texts = [self._vocabulary.text(token) for token in tokens] if wants_texts else None
        counts = {"count": len(tokens), "max_model_len": max_model_len}
        return orjson.dumps({**counts, "tokens": tokens, "token_strs": texts})

    def _detokenized(self, body: bytes) -> bytes:
        request = schemas.validated(DetokenizeTokens, parse_object(body))
        self._check(request)
        return orjson.dumps({"prompt": self._decode(request.tokens)})

    def _decode(self, tokens: list[int]) -> str:
        if max(tokens, default=0) >= self._codec.vocab_size:
            raise InvalidRequest(f"token ids are from 0 to {self._codec.vocab_size - 1}", param="tokens")
        text: str = self._codec.tokenizer.decode(tokens, skip_special_tokens=False)
        return text

    def _encode(self, body: Mapping[str, Any]) -> list[int]:
        if "messages" not in body:
            text = schemas.validated(TokenizeText, body)
            self._check(text)
            return self._codec.encode_text(text.prompt, add_special_tokens=text.add_special_tokens)
        if body.get("prompt") is not None:
            raise InvalidRequest("prompt and messages exclude each other", param="prompt")
        chat = schemas.validated(TokenizeChat, body)
        self._check(chat)
        if chat.add_special_tokens:
            text_of_refusal = "add_special_tokens with messages is not supported: the chat template adds them"
            raise UnsupportedFeature(text_of_refusal, param="add_special_tokens")
        schemas.check_continued(chat.continue_final_message, chat.add_generation_prompt)
        messages = schemas.template_messages(chat.messages)
        rendered = chat_text(
            self._codec,
            messages,
            tools_of(chat.tools, None, None, Ignored()),
            chat.chat_template_kwargs or {},
            add_generation_prompt=chat.add_generation_prompt is not False,
            continues_last=chat.continue_final_message,
        )
        return self._codec.encode_rendered(rendered)

    def _check(self, request: _Fields) -> None:
        if request.model is not None and request.model not in self._names:
            raise unknown_model(request.model, self._names)
        refuse_unsupported(request.model_extra or {})
