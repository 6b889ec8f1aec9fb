"""POST /tokenize and POST /detokenize, in vLLM's shapes: a text or a chat to token ids, and ids to a text.

Knows the codec; nothing of sequences. Special tokens are shown in a text made from ids.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field

from services.gateway import schemas
from services.gateway.errors import UnsupportedFeature
from services.gateway.features import refuse_unsupported
from services.gateway.threads import TokenizerThreads
from services.gateway.tokenizer import Codec
from services.gateway.vocabulary import Vocabulary
from shared.errors import InvalidRequest, UnknownModel


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="allow", protected_namespaces=())

    model: str | None = None


class TokenizeText(_Fields):
    """What /v1/completions would make of `prompt`."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChat(_Fields):
    """What /v1/chat/completions would make of `messages`."""

    messages: Annotated[list[schemas.Message], FailFast()] = Field(min_length=1)
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    return_token_strs: bool | None = None


class DetokenizeTokens(_Fields):
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], FailFast()]


class Tokenization:
    """Serves one model, named or not."""

    def __init__(
        self, served_name: str, codec: Codec, threads: TokenizerThreads, vocabulary: Vocabulary
    ) -> None:
        self._served_name = served_name
        self._codec = codec
        self._threads = threads
        self._vocabulary = vocabulary

    async def tokenize(self, body: Mapping[str, Any], max_model_len: int) -> dict[str, Any]:
        """`{count, max_model_len, tokens, token_strs}`. Raises InvalidRequest and its kinds, Overloaded."""
        encode = self._encoding(body)
        wants_texts = body.get("return_token_strs") is True

        def work() -> tuple[list[int], list[str] | None]:
            tokens = encode()
            return tokens, [self._vocabulary.text(token) for token in tokens] if wants_texts else None

        tokens, texts = await self._threads.run(work)
        counts = {"count": len(tokens), "max_model_len": max_model_len}
        return {**counts, "tokens": tokens, "token_strs": texts}

    async def detokenize(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """`{prompt}`. Raises as `tokenize` does."""
        request = schemas.validated(DetokenizeTokens, body)
        self._check(request)
        return {"prompt": await self._threads.run(lambda: self._decode(request.tokens))}

    def _decode(self, tokens: list[int]) -> str:
        if max(tokens, default=0) >= self._codec.vocab_size:
            raise InvalidRequest(f"token ids are from 0 to {self._codec.vocab_size - 1}", param="tokens")
        text: str = self._codec.tokenizer.decode(tokens, skip_special_tokens=False)
        return text

    def _encoding(self, body: Mapping[str, Any]) -> Callable[[], list[int]]:
        """What is to be done in a thread."""
        if "messages" not in body:
            text = schemas.validated(TokenizeText, body)
            self._check(text)
            return lambda: self._codec.encode_text(text.prompt, add_special_tokens=text.add_special_tokens)
        if body.get("prompt") is not None:
            raise InvalidRequest("prompt and messages exclude each other", param="prompt")
        chat = schemas.validated(TokenizeChat, body)
        self._check(chat)
        if chat.add_special_tokens:
            text_of_refusal = "add_special_tokens with messages is not supported: the chat template adds them"
            raise UnsupportedFeature(text_of_refusal, param="add_special_tokens")
        messages = schemas.template_messages(chat.messages)
        return lambda: self._codec.encode_chat(messages, add_generation_prompt=chat.add_generation_prompt)

    def _check(self, request: _Fields) -> None:
        if request.model not in (None, self._served_name):
            text = f"the model {request.model!r} does not exist; there is {self._served_name!r}"
            raise UnknownModel(text, param="model")
        refuse_unsupported(request.model_extra or {})
