"""OpenAI's request bodies: JSON, types and ranges. Unknown fields stay in `model_extra`."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, cast

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, PlainValidator, ValidationError

from services.gateway.errors import UnsupportedFeature, shown
from services.gateway.openai.tools import template_calls
from shared.errors import InvalidRequest

MAX_FIELDS = 1024
"""Limit of top-level fields; OpenAI's API has about forty."""
MAX_ENTRIES = 32_768
"""Limit of objects, lists and named fields in a body. A million would block the interpreter for 0.5 s."""
MAX_VALUES = 524_288
"""Limit of values in lists and objects: four prompts of 131,072 token ids. Two million would block for 0.7
s."""
_MOST_QUOTES = 131_072


def parse_object(body: bytes, max_entries: int = MAX_ENTRIES) -> dict[str, Any]:
    """Return the JSON object in `body`. Raises InvalidRequest for other data, or above a limit."""
    if _has_more(body, (b"{", b"[", b":"), max_entries):
        text = "objects, lists and named fields in one request"
        raise InvalidRequest(f"the body has more than {max_entries} {text}: send fewer")
    if _has_more(body, (b",",), MAX_VALUES):
        raise InvalidRequest(f"the body has more than {MAX_VALUES} values in one request: send fewer")
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON in UTF-8: {error}") from None
    if not isinstance(content, dict):
        raise InvalidRequest("the body is not a JSON object")
    if len(content) > MAX_FIELDS:
        raise InvalidRequest(f"the body has {len(content)} fields; send at most {MAX_FIELDS}")
    return content


def parse_chat(body: bytes, max_messages: int) -> dict[str, Any]:
    """Like `parse_object`, for a body with `messages`. Raises InvalidRequest above `max_messages`; each
    content part counts as one. Even an empty message takes as long to render as a long one."""
    content = parse_object(body, max(MAX_ENTRIES, 8 * max_messages))
    messages = content.get("messages")
    if isinstance(messages, list):
        parts = (message.get("content") for message in messages if isinstance(message, dict))
        count = len(messages) + sum(len(part) for part in parts if isinstance(part, list))
        if count > max_messages:
            text = f"{count} messages and content parts; send at most {max_messages} in one request"
            raise InvalidRequest(text, param="messages")
    return content


def _has_more(body: bytes, signs: tuple[bytes, ...], limit: int) -> bool:
    """Whether `signs` occur more than `limit` times outside strings. Counts on the raw bytes within
    milliseconds. Never undercounts up to the first invalid JSON, where a parser stops. May count inside
    strings if there are very many."""
    if len(body) <= limit or sum(map(body.count, signs)) <= limit:
        return False
    texts_apart = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"', _MOST_QUOTES)
    return sum(map(b"".join(texts_apart[::2]).count, signs)) > limit


MAX_STOPS = 32
"""OpenAI allows four; Anthropic has no limit."""
MAX_STOP_CHARS = 1024
MAX_TOKEN_CHOICES = 1024
MAX_REPETITION_PENALTY = 100.0
"""Its inverse is the minimum: beyond, half-precision logits overflow."""
_UNION_BRANCH = re.compile(r"(str|int|float|bool|(list|dict)\[.*\]|constrained-.*|function-.*)")

_TokenId = Annotated[int, Field(ge=0)]
Bias = Annotated[float, Field(ge=-100, le=100)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=1024)]
RequestPriority = Annotated[int, Field(ge=-(2**31) + 1, le=2**31 - 1)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


def _stops(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop strings")
    return [value] if isinstance(value, str) else value


def _content(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        return value
    raise ValueError("should be a string or a list of content parts")


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


def texts_or_tokens(value: Any) -> list[Any]:
    """Return the value as a list of texts or of token lists. A pydantic union would collect an error per
    token in each wrong branch."""
    if isinstance(value, str) or _is_tokens(value):
        return [value]
    prompts = value
    if not isinstance(prompts, list) or not prompts:
        raise ValueError(
            "should be a string, a list of strings, a list of token ids, or a list of such lists"
        )
    if not (all(isinstance(p, str) for p in prompts) or all(_is_tokens(p) for p in prompts)):
        raise ValueError("should be all strings, or all lists of token ids")
    return prompts


class StrictModel(BaseModel):
    """An object in a body. None means absent, as in OpenAI's schema; unknown fields are in `model_extra`."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", protected_namespaces=())


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class NamesModel(StrictModel):
    """A request that names a model."""

    model: str


class CompletionFields(NamesModel):
    """Fields of both completion endpoints."""

    max_tokens: int | None = Field(None, ge=0)
    n: int | None = Field(None, ge=1, le=128)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Annotated[
        list[StopString] | None, BeforeValidator(_stops, json_schema_input_type=str | list[str] | None)
    ] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    cache_salt: CacheSalt | None = None
    priority: RequestPriority | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=1 / MAX_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)
    min_p: float | None = Field(None, ge=0, le=1)
    min_tokens: int | None = Field(None, ge=0)
    stop_token_ids: Annotated[list[_TokenId] | None, Field(max_length=128), FailFast()] = None
    logit_bias: Annotated[dict[str, Bias] | None, Field(max_length=MAX_TOKEN_CHOICES), FailFast()] = None
    allowed_token_ids: Annotated[list[_TokenId] | None, Field(max_length=MAX_TOKEN_CHOICES), FailFast()] = (
        None
    )
    bad_words: Annotated[list[StopString] | None, Field(max_length=128), FailFast()] = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")] | None = None
    return_token_ids: bool | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json_object: Any = None


class RequestMessage(StrictModel):
    """One message of a chat. `content` is a string or a list of typed parts."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str | list[dict[str, Any]] | None, PlainValidator(_content)] = None
    name: str | None = None
    tool_calls: Any = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    function_call: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None


class ChatRequest(CompletionFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[RequestMessage], FailFast()] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def logprobs_wanted(self) -> int | None:
        """Number of top tokens to return per token; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TextRequest(CompletionFields):
    """POST /v1/completions. Each prompt is a text or a list of token ids."""

    prompt: Annotated[Any, PlainValidator(texts_or_tokens)]
    best_of: int | None = Field(None, ge=0, le=20)
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        return cast(list[str | list[int]], self.prompt)

    @property
    def logprobs_wanted(self) -> int | None:
        return self.logprobs


class EmbeddingRequest(NamesModel):
    """POST /v1/embeddings."""

    input: Annotated[
        Any,
        PlainValidator(texts_or_tokens, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    add_special_tokens: bool | None = None
    cache_salt: CacheSalt | None = None
    priority: RequestPriority | None = None


CompletionRequest = ChatRequest | TextRequest
R = TypeVar("R", bound=CompletionFields)
M = TypeVar("M", bound=BaseModel)


def parse(schema: type[R], body: Mapping[str, Any]) -> R:
    """Return the parsed request. Raises InvalidRequest with the path of the first wrong field as `param`."""
    request = validated(schema, body)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options goes with stream: true only", param="stream_options")
    if isinstance(request, ChatRequest):
        if request.top_logprobs and not request.logprobs:
            raise InvalidRequest("top_logprobs goes with logprobs: true only", param="top_logprobs")
        check_continued(request.continue_final_message, request.add_generation_prompt)
    return request


def check_continued(continues: bool | None, adds_prompt: bool | None) -> None:
    """Raise InvalidRequest if the last message is both continued and followed by a prompt for a new one."""
    if continues and adds_prompt:
        text = "continue_final_message goes with add_generation_prompt: false only"
        raise InvalidRequest(text, param="continue_final_message")


def validated(schema: type[M], body: Mapping[str, Any]) -> M:
    """Return `body` as a `schema`. Raises as `parse` does."""
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        path = _path(first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        raise InvalidRequest(f"{path}: {reason}", param=path) from None


def template_messages(messages: list[RequestMessage]) -> list[dict[str, Any]]:
    """Return messages for templates: text only, parts joined by newlines, `developer` renamed to `system`.
    Raises UnsupportedFeature for audio and other non-text parts."""
    rendered: list[dict[str, Any]] = []
    for at, message in enumerate(messages):
        path = f"messages[{at}]"
        if message.role == "function":
            raise UnsupportedFeature("messages of role function are not supported", param=f"{path}.role")
        if message.role == "tool" and message.tool_call_id is None:
            where = f"{path}.tool_call_id"
            raise InvalidRequest(f"{where} is required: which call this is the result of", param=where)
        for field in ("function_call", "audio"):
            if getattr(message, field):
                text = f"{field} in a message is not supported"
                raise UnsupportedFeature(text, param=f"{path}.{field}")
        if message.content is None and message.role != "assistant":
            raise InvalidRequest(f"{path}.content is required", param=f"{path}.content")
        role = "system" if message.role == "developer" else message.role
        shown: dict[str, Any] = {"role": role, "content": _text(message.content, f"{path}.content")}
        if message.tool_calls:
            shown["tool_calls"] = template_calls(message.tool_calls, f"{path}.tool_calls")
        for field in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(message, field)) is not None:
                shown[field] = value
        rendered.append(shown)
    return rendered


def _text(content: str | list[dict[str, Any]] | None, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for at, part in enumerate(content):
        if (kind := part.get("type")) not in ("text", "refusal"):
            why = f"content parts of type {shown(repr(kind), 100)} are not supported: send text"
            raise UnsupportedFeature(why, param=f"{path}[{at}].type")
        text = part.get(part["type"])
        if not isinstance(text, str):
            raise InvalidRequest("a text part needs a string `text`", param=f"{path}[{at}].text")
        texts.append(text)
    return "\n".join(texts)


def _path(location: tuple[int | str, ...]) -> str:
    """Return the path, as in `messages[0].content`, without pydantic's names of union branches."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not path:
            path = part
        elif not _UNION_BRANCH.fullmatch(part):
            path += f".{part}"
    return path
