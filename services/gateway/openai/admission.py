"""From a request body to a job: validated, tokenized and within the limits, or refused.

Knows the model's codec and the configured limits; nothing of HTTP connections or of the bus.
"""

import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.gateway.config import GatewayConfig
from services.gateway.errors import UnsupportedFeature, unknown_model
from services.gateway.openai import schemas
from services.gateway.openai.replies import ReplyKind
from services.gateway.openai.schemas import parse_chat, parse_object
from services.gateway.openai.structured import GUIDED, grammar_of
from services.gateway.openai.tools import Tools, chat_text, tools_of
from services.gateway.parts.formats import HARMONY, MOST_CALLS
from services.gateway.parts.items import PartReader
from services.gateway.parts.readers import THINK, PlainReader, ThinkingReader
from services.gateway.text.tokenizer import AT_ONCE_BYTES, Codec, TokenizerThreads
from shared.errors import ContextOverflow, InvalidRequest
from shared.grammars import Grammars
from shared.messages.sequence import Sampling

LEAST_TEMPERATURE = 1e-5
LEAST_TOP_P = 1e-6


def sampling_of(
    request: schemas.CompletionRequest, codec: Codec, seed: int, max_tokens: int, grammar: str = ""
) -> Sampling:
    """What a sampler could trip over is moved to where it means the same.

    Raises InvalidRequest for a `min_tokens` above `max_tokens` and for tokens the model does not have.
    """
    temperature = 1.0 if request.temperature is None else float(request.temperature)
    top_p = 1.0 if request.top_p is None else float(request.top_p)
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {min_tokens}, but the answer may have {max_tokens} tokens at most: "
            "lower it, or raise max_tokens",
            param="min_tokens",
        )
    return Sampling(
        seed=seed,
        max_tokens=max_tokens,
        temperature=temperature if temperature >= LEAST_TEMPERATURE else 0.0,
        top_p=max(top_p, LEAST_TOP_P),
        top_k=min(max(request.top_k or 0, 0), codec.vocab_size),
        end_token_ids=_end_token_ids(request, codec),
        min_p=float(request.min_p or 0.0),
        min_tokens=min_tokens,
        presence_penalty=float(request.presence_penalty or 0.0),
        frequency_penalty=float(request.frequency_penalty or 0.0),
        repetition_penalty=1.0 if request.repetition_penalty is None else float(request.repetition_penalty),
        top_logprobs=request.logprobs_wanted,
        grammar=grammar,
    )


def _end_token_ids(request: schemas.CompletionFields, codec: Codec) -> tuple[int, ...]:
    """The model's, unless they are ignored, and the client's own in any case."""
    own = request.stop_token_ids or []
    if any(token >= codec.vocab_size for token in own):
        raise InvalidRequest(f"token ids are from 0 to {codec.vocab_size - 1}", param="stop_token_ids")
    return tuple(dict.fromkeys((*(() if request.ignore_eos else codec.end_token_ids), *own)))


DEFAULT_TEXT_MAX_TOKENS = 16
"""What OpenAI's /v1/completions answers with when no limit is given."""
SEED_MASK = 2**63 - 1

STRUCTURED_FIELDS = ("response_format", "structured_outputs", *GUIDED)
MOST_CHECKED = 256
"""Grammars that are known to be good."""

ContextLimit = Callable[[], Awaitable[int]]
"""Longest prompt + answer in tokens, once it is known: no worker may have been heard of yet."""


@dataclass(frozen=True)
class AdmittedRequest:
    """What is to be generated: for each prompt, `n` choices under one sampling."""

    kind: ReplyKind
    prompts: tuple[tuple[int, ...], ...]
    samplings: tuple[Sampling, ...]
    """One per prompt; they differ in what the context leaves to the answer."""
    n: int
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    unknown_fields: tuple[str, ...]
    cache_salt: str = ""
    """From the client: what it wants to share stored prefixes within."""
    reader: Callable[[], PartReader] | None = None
    """Takes an answer apart; None: all of it is content."""
    shows_special: bool = False
    """The reader looks for special tokens."""

    @property
    def top_logprobs(self) -> int | None:
        """How many of the likeliest tokens go with each token; None: no log-probabilities."""
        return self.samplings[0].top_logprobs


@dataclass(frozen=True)
class _Chat:
    """A body that was read."""

    request: schemas.ChatRequest
    messages: list[dict[str, Any]]
    tools: Tools


NO_TOOLS = Tools()


class GrammarChecks:
    """Whether grammars can be followed, found in threads; remembers those that can."""

    def __init__(self, grammars: Grammars | None, threads: TokenizerThreads) -> None:
        self._grammars = grammars
        self._threads = threads
        self._good: OrderedDict[str, None] = OrderedDict()

    async def check(self, grammar: str, param: str) -> None:
        """Raises InvalidRequest naming `param`, UnsupportedFeature for a model without, Overloaded."""
        grammars = self._grammars
        if grammars is None:
            raise UnsupportedFeature("this model's answers cannot be kept to a form", param=param)
        if grammar in self._good:
            self._good.move_to_end(grammar)
            return
        try:
            await self._threads.encode(lambda: grammars.check(grammar), max(len(grammar), AT_ONCE_BYTES + 1))
        except InvalidRequest as error:
            raise InvalidRequest(f"{param} is not supported: {error.message}", param=param) from None
        self._good[grammar] = None
        if len(self._good) > MOST_CHECKED:
            self._good.popitem(last=False)


class Acceptance:
    """Turns bodies into jobs; reads and tokenizes in threads of its own, a bounded number at a time."""

    def __init__(self, config: GatewayConfig, codec: Codec) -> None:
        self._config = config
        self.codec = codec
        self.threads = TokenizerThreads(config.tokenizer_threads, config.max_waiting_tokenizations)
        self.checks = GrammarChecks(codec.grammars, self.threads)

    async def chat(self, body: bytes, context: ContextLimit) -> AdmittedRequest:
        """A job of one prompt. Raises InvalidRequest and its kinds, Overloaded, or what `context` raises."""
        chat = await self.threads.read(lambda: self._chat(body), len(body))
        grammar = await self._grammar(chat.request, chat.tools)
        prompt, is_thinking = await self.threads.encode(lambda: self._prompt(chat, grammar), len(body))
        limit = chat.request.max_completion_tokens or chat.request.max_tokens
        job = self._job("chat", chat.request, [prompt], limit, await context(), grammar)
        reader = self._reader(chat.tools, is_held=bool(grammar), is_thinking=is_thinking)
        marks = self.codec.special_tokens.intersection(self.codec.call_format.marks)
        return replace(job, reader=reader, shows_special=reader is not None and bool(marks))

    async def text(self, body: bytes, context: ContextLimit) -> AdmittedRequest:
        """A job of one or several prompts. Raises as `chat` does."""
        request = await self.threads.read(lambda: self._text(body), len(body))
        prompts = await self.threads.encode(lambda: [self._encode(p) for p in request.prompts], len(body))
        grammar = await self._grammar(request)
        return self._job("text", request, prompts, request.max_tokens, await context(), grammar)

    async def _grammar(self, request: schemas.CompletionRequest, tools: Tools = NO_TOOLS) -> str:
        """What the answer is to keep to; empty: nothing. Raises InvalidRequest, UnsupportedFeature."""
        form, param = grammar_of({name: getattr(request, name) for name in STRUCTURED_FIELDS})
        writer, added = self.codec.call_format, self.codec.added_tokens
        if tools.mode == "required" and form:
            raise InvalidRequest(f"an answer that has to call a function has no {param}", param=param)
        if tools.mode == "required" or (tools.is_any and form):
            most_calls = MOST_CALLS if tools.is_parallel else 1
            grammar = writer.grammar(tools.functions, added, most_calls=most_calls, form=form)
            param = "tools"
        elif form:
            grammar = writer.form(form, added) if isinstance(request, schemas.ChatRequest) else form
        else:
            return ""
        for name in ("ignore_eos", "min_tokens"):
            if getattr(request, name):
                text = f"{name} does not go with {param}: the answer ends where its form does"
                raise InvalidRequest(text, param=name)
        await self.checks.check(grammar, param)
        return grammar

    def _chat(self, body: bytes) -> _Chat:
        request = schemas.parse(schemas.ChatRequest, parse_chat(body, self._config.max_messages))
        self._check(request)
        tools = tools_of(request.tools, request.tool_choice, request.parallel_tool_calls)
        return _Chat(request, schemas.template_messages(request.messages), tools)

    def _prompt(self, chat: _Chat, grammar: str) -> tuple[list[int], bool]:
        """Its tokens, and whether it ends inside of what the model thinks."""
        variables = dict(chat.request.chat_template_kwargs or {})
        if chat.request.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", chat.request.reasoning_effort)
        if grammar and self.codec.chat_template.thinks:  # what it thinks would not be in its form
            variables.setdefault("enable_thinking", False)
        text = chat_text(self.codec, chat.messages, chat.tools, variables)
        return self.codec.encode_rendered(text), text.rstrip().endswith(THINK)

    def _reader(self, tools: Tools, *, is_held: bool, is_thinking: bool) -> Callable[[], PartReader] | None:
        """`is_held`: to a grammar, which has no room for thoughts."""
        writer = self.codec.call_format
        if writer is HARMONY:
            return writer.reader
        calls = writer.reader if tools.is_any else None
        if self.codec.chat_template.thinks and not is_held:
            return lambda: ThinkingReader((calls or PlainReader)(), is_open=is_thinking)
        return calls

    def _text(self, body: bytes) -> schemas.TextRequest:
        request = schemas.parse(schemas.TextRequest, parse_object(body))
        self._check(request)
        if (request.best_of or 1) > (request.n or 1):
            raise InvalidRequest("best_of above n is not supported", param="best_of")
        if len(request.prompts) * (request.n or 1) > self._config.max_sequences_per_request:
            limit = self._config.max_sequences_per_request
            raise InvalidRequest(f"prompts times n may be at most {limit}", param="prompt")
        return request

    def close(self) -> None:
        self.threads.close()

    def _check(self, request: schemas.CompletionFields) -> None:
        if request.model != self._config.served_name:
            raise unknown_model(request.model, self._config.served_name)
        schemas.refuse_unsupported(request.model_extra or {})
        if (request.n or 1) > self._config.max_n:
            raise InvalidRequest(f"n may be at most {self._config.max_n}", param="n")

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.codec.encode_text(prompt)
        if any(not 0 <= token < self.codec.vocab_size for token in prompt):
            raise InvalidRequest(f"token ids are from 0 to {self.codec.vocab_size - 1}", param="prompt")
        return prompt

    def _job(
        self,
        kind: ReplyKind,
        request: schemas.CompletionRequest,
        prompts: Sequence[Sequence[int]],
        limit: int | None,
        context_tokens: int,
        grammar: str,
    ) -> AdmittedRequest:
        seed = secrets.randbits(63) if request.seed is None else request.seed & SEED_MASK
        limits = [self._limit(kind, len(prompt), limit, context_tokens) for prompt in prompts]
        return AdmittedRequest(
            kind=kind,
            prompts=tuple(tuple(prompt) for prompt in prompts),
            samplings=tuple(
                sampling_of(request, self.codec, seed, max_tokens, grammar) for max_tokens in limits
            ),
            n=request.n or 1,
            stops=tuple(request.stop or ()),
            stream=bool(request.stream),
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
            unknown_fields=tuple(schemas.unknown_fields(request.model_extra or {})),
            cache_salt=request.cache_salt or "",
        )

    def _limit(self, kind: ReplyKind, prompt_tokens: int, limit: int | None, context_tokens: int) -> int:
        """Longest answer. Raises ContextOverflow, in the words that clients look for."""
        param = "messages" if kind == "chat" else "prompt"
        if prompt_tokens == 0:
            raise InvalidRequest("the prompt has no tokens", param=param)
        left = context_tokens - prompt_tokens
        wanted = limit or 1
        if wanted > left:
            requested = f"{prompt_tokens} in the {param}, {wanted} in the completion"
            raise ContextOverflow(
                f"This model's maximum context length is {context_tokens} tokens. However, you requested "
                f"{prompt_tokens + wanted} tokens ({requested}). "
                f"Please reduce the length of the {param} or completion.",
                param=param,
            )
        if limit is not None:
            return limit
        default = DEFAULT_TEXT_MAX_TOKENS if kind == "text" else self._config.default_max_tokens
        return min(left, default or left)
