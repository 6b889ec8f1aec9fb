"""Turns request bodies into jobs: validates, tokenizes and checks limits."""

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import msgspec

from services.gateway.config import GatewayConfig
from services.gateway.errors import UnsupportedFeature, unknown_model
from services.gateway.forms.checks import GrammarChecks
from services.gateway.forms.json_schemas import prepared
from services.gateway.openai import fields, schemas
from services.gateway.openai.fields import Ignored
from services.gateway.openai.replies import ReplyKind
from services.gateway.openai.schemas import parse_chat, parse_object
from services.gateway.openai.structured import GUIDED, grammar_of
from services.gateway.openai.tools import TemplateMessage, Tools, for_template, tools_of
from services.gateway.parts.formats import HARMONY, MOST_CALLS
from services.gateway.parts.items import PartReader
from services.gateway.parts.readers import THINK, THOUGHT, HarmonyReader, PlainReader, ThinkingReader
from services.gateway.text.choice_text import NOT_GIVEN, Given, TextRules, decode
from services.gateway.text.tokenizer import Codec, TokenizerThreads, Vocabulary
from shared.errors import ContextOverflow, InvalidRequest
from shared.grammars import json_grammar
from shared.messages.sequence import Sampling, pack_tokens

LEAST_TEMPERATURE = 1e-5
LEAST_TOP_P = 1e-6


def sampling_of(
    request: schemas.CompletionRequest,
    codec: Codec,
    seed: int,
    max_tokens: int,
    grammar: str = "",
    forced: Sequence[int] = (),
    default_temperature: float = 1.0,
) -> Sampling:
    """Return the request's sampling parameters, with edge values replaced by safe equivalents. Raises
    InvalidRequest for `min_tokens` above `max_tokens` and for unknown tokens."""
    temperature = default_temperature if request.temperature is None else float(request.temperature)
    top_p = 1.0 if request.top_p is None else float(request.top_p)
    min_tokens, top_logprobs = request.min_tokens or 0, request.logprobs_wanted
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {min_tokens}, but the answer may have {max_tokens} tokens at most: "
            "lower it, or raise max_tokens",
            param="min_tokens",
        )
    if request.prompt_logprobs is not None:
        top_logprobs = max(top_logprobs or 0, request.prompt_logprobs)
    ends = () if request.ignore_eos else codec.end_token_ids
    if request.stop_token_ids:
        ends = tuple(dict.fromkeys((*ends, *_checked(request.stop_token_ids, codec, "stop_token_ids"))))
    sampling = Sampling(
        seed=seed,
        max_tokens=max_tokens + len(forced),
        temperature=temperature if temperature >= LEAST_TEMPERATURE else 0.0,
        top_p=max(top_p, LEAST_TOP_P),
        top_k=min(max(request.top_k or 0, 0), codec.vocab_size),
        end_token_ids=ends,
        min_p=float(request.min_p or 0.0),
        min_tokens=min_tokens,
        presence_penalty=float(request.presence_penalty or 0.0),
        frequency_penalty=float(request.frequency_penalty or 0.0),
        repetition_penalty=1.0 if request.repetition_penalty is None else float(request.repetition_penalty),
        top_logprobs=top_logprobs,
        grammar=grammar,
        forced=pack_tokens(forced),
    )
    if request.logit_bias or request.allowed_token_ids or request.bad_words:
        return msgspec.structs.replace(sampling, **_token_choices(request, codec))
    return sampling


def _token_choices(request: schemas.CompletionFields, codec: Codec) -> dict[str, Any]:
    """Return the sampling parameters that favour or forbid tokens. Raises InvalidRequest."""
    biases = request.logit_bias or {}
    if not all(token.isdecimal() and len(token) < 10 for token in biases):
        raise InvalidRequest("logit_bias is by token ids", param="logit_bias")
    tokens = _checked([int(token) for token in biases], codec, "logit_bias")
    return {
        "logit_bias": tuple(zip(tokens, map(float, biases.values()), strict=True)),
        "allowed_token_ids": _checked(request.allowed_token_ids or (), codec, "allowed_token_ids"),
        "bad_words": bad_word_tokens(request.bad_words or (), codec),
    }


def bad_word_tokens(words: Sequence[str], codec: Codec) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word, at the start of a text and after a space, as vLLM does."""
    texts = [text for word in words for text in (word, f" {word}")]
    runs = (codec.encode_text(text, add_special_tokens=False) for text in texts)
    return tuple(dict.fromkeys(tuple(run) for run in runs if run))


def _checked(tokens: Sequence[int], codec: Codec, param: str) -> tuple[int, ...]:
    if any(token >= codec.vocab_size for token in tokens):
        raise InvalidRequest(f"token ids are from 0 to {codec.vocab_size - 1}", param=param)
    return tuple(tokens)


DEFAULT_TEXT_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions."""
SEED_MASK = 2**63 - 1

STRUCTURED_FIELDS = ("response_format", "structured_outputs", *GUIDED)

ContextLimit = Callable[[], Awaitable[int]]
"""Returns the context length in tokens, once a worker has reported it."""


@dataclass(frozen=True)
class AdmittedRequest:
    """A validated job: for each prompt, `n` choices with one sampling."""

    kind: ReplyKind
    prompts: tuple[tuple[int, ...], ...]
    samplings: tuple[Sampling, ...]
    """One per prompt; they differ in `max_tokens`."""
    n: int
    rules: TextRules
    stream: bool
    include_usage: bool
    continuous_usage: bool = False
    top_logprobs: int | None = None
    """Number of top tokens to return per token; None: no log-probabilities."""
    cache_salt: str = ""
    """From the client: requests with the same salt share cached prefixes."""
    priority: int = 0
    reader: Callable[[], PartReader] | None = None
    given: tuple[Given, ...] = ()
    """For each prompt, its tail that is not in `prompts`: the worker is forced to generate it."""
    prompt_logprobs: int | None = None
    client_id: str | None = None
    ignored: tuple[str, ...] = ()
    whole_prompts: tuple[Sequence[int], ...] = ()
    """Each prompt including its forced tail."""
    prompt_tokens: int = 0


class _Prompt(NamedTuple):
    tokens: list[int]
    is_thinking: bool
    """The prompt ends inside the model's reasoning."""
    begun: str
    """Beginning of the continued message, as the prompt has it."""


@dataclass(frozen=True)
class _Chat:
    request: schemas.ChatRequest
    messages: list[dict[str, Any]]
    tools: Tools
    ignored: tuple[str, ...]


NO_TOOLS = Tools()


class Acceptance:
    """Turns bodies into jobs, in a bounded thread pool."""

    def __init__(self, config: GatewayConfig, codec: Codec) -> None:
        """For the model that `config` names, and its aliases."""
        self.config = config
        self.name = own = config.served_name
        self.names = (own, *(alias for alias, name in config.aliases.items() if name == own))
        self.adapter = ""
        self.codec = codec
        self.vocabulary = Vocabulary(codec.tokenizer)
        self.threads = TokenizerThreads(config.tokenizer_threads, config.max_waiting_tokenizations)
        self.checks = GrammarChecks(codec.forms_folder)
        self._thinks = codec.template is not None and codec.template.thinks
        pooling = config.embedding_pooling
        self.pools_mean = pooling == "mean" or (pooling == "auto" and codec.pools_mean)
        """An embedding is the mean over all tokens."""

    def with_adapter(self, adapter: str, asked: str) -> "Acceptance":
        """Return the same for one of the model's LoRA adapters; `asked`: its name in the request."""
        found = copy(self)
        found.adapter, found.name = adapter, f"{self.name}:{adapter}"
        found.names = (found.name, asked)
        return found

    def ignored(self) -> Ignored:
        """Return a new record of one request's ignored fields."""
        return Ignored(is_strict=self.config.unknown_fields == "refuse")

    async def chat(self, body: bytes, context: ContextLimit, key: str = "") -> AdmittedRequest:
        """Return a job of one prompt; `key` is the client's. Raises InvalidRequest, UnavailableError and
        their subclasses, or what `context` raises."""
        read = partial(parse_chat, body, self.config.max_messages)
        return await self.chat_of(read, len(body), context, self.ignored(), key)

    async def chat_of(
        self,
        read: Callable[[], Mapping[str, Any]],
        size_bytes: int,
        context: ContextLimit,
        ignored: Ignored,
        key: str = "",
    ) -> AdmittedRequest:
        """Like `chat`, for a body that `read` converts from another API."""
        chat = await self.threads.read(partial(self._chat, read, ignored), size_bytes)
        request = chat.request
        grammar = await self._grammar(request, key, size_bytes, chat.tools)
        prompt = await self.threads.encode(partial(self._prompt, chat, grammar), size_bytes)
        limit = request.max_completion_tokens
        limit = request.max_tokens if limit is None else limit
        job = self._job("chat", request, [prompt.tokens], limit, await context(), grammar, chat.ignored)
        if not (chat.tools.mode != "none" or self._thinks or self.codec.call_format is HARMONY):
            return job
        reader = self._reader(chat.tools, prompt, is_held=bool(grammar))
        marks = self.codec.special_tokens.intersection(self.codec.call_format.marks)
        shows_special = job.rules.shows_special or (reader is not None and bool(marks))
        return replace(job, reader=reader, rules=replace(job.rules, shows_special=shows_special))

    async def count(self, read: Callable[[], Mapping[str, Any]], size_bytes: int, ignored: Ignored) -> int:
        """Return the number of tokens in the chat's prompt. Raises as `chat` does."""
        chat = await self.threads.read(partial(self._chat, read, ignored), size_bytes)
        prompt = await self.threads.encode(partial(self._prompt, chat, ""), size_bytes)
        return len(prompt.tokens)

    async def text(self, body: bytes, context: ContextLimit, key: str = "") -> AdmittedRequest:
        """Return a job of one or several prompts. Raises as `chat` does."""
        ignored = self.ignored()
        request = await self.threads.read(partial(self._text, body, ignored), len(body))
        adds_special = request.add_special_tokens is not False
        prompts = await self.threads.encode(
            lambda: [self.encode(each, "prompt", adds_special=adds_special) for each in request.prompts],
            len(body),
        )
        grammar = await self._grammar(request, key, len(body), NO_TOOLS)
        limit = request.max_tokens
        return self._job("text", request, prompts, limit, await context(), grammar, ignored.names)

    async def _grammar(
        self, request: schemas.CompletionRequest, key: str, size_bytes: int, tools: Tools
    ) -> str:
        """Return the answer's grammar; empty: none. Raises InvalidRequest, UnavailableError."""
        if request.model_fields_set.isdisjoint(STRUCTURED_FIELDS) and tools.mode != "required":
            return ""
        written = await self.threads.encode(lambda: self._written(request, tools), size_bytes)
        return "" if written is None else await self.checks.check(*written[:2], key, written[2])

    def _written(
        self, request: schemas.CompletionRequest, tools: Tools
    ) -> tuple[str, str, list[tuple[str, str]]] | None:
        """Return a grammar, its field, and its parts with their fields. Raises InvalidRequest."""
        form, param = grammar_of({name: getattr(request, name) for name in STRUCTURED_FIELDS})
        writer, added = self.codec.call_format, self.codec.added_tokens
        parts = [(param, form)] if form else []
        if tools.mode == "required" and form:
            raise InvalidRequest(f"an answer that has to call a function has no {param}", param=param)
        if tools.mode == "required" or (tools.mode != "none" and form):
            functions = [
                replace(each, parameters=prepared(each.parameters, each.path)) for each in tools.functions
            ]
            most_calls = MOST_CALLS if tools.is_parallel else 1
            grammar = writer.grammar(functions, added, most_calls=most_calls, form=form)
            parts += [(each.path, json_grammar(each.parameters)) for each in functions]
            param = "tools"
        elif form:
            grammar = writer.form(form, added) if isinstance(request, schemas.ChatRequest) else form
        else:
            return None
        for name in ("ignore_eos", "min_tokens", "allowed_token_ids", "bad_words"):
            if getattr(request, name):
                text = f"{name} does not go with {param}: the answer ends where its form does"
                raise InvalidRequest(text, param=name)
        return grammar, param, parts

    def _chat(self, read: Callable[[], Mapping[str, Any]], ignored: Ignored) -> _Chat:
        request = schemas.parse(schemas.ChatRequest, read())
        self._check(request, ignored)
        tools = NO_TOOLS
        if request.tools or request.tool_choice is not None:
            tools = tools_of(request.tools, request.tool_choice, request.parallel_tool_calls, ignored)
        for message in request.messages:
            if message.model_extra:
                known = schemas.RequestMessage.model_fields
                ignored.others(message.model_extra, known, "messages", fields.ECHOED)
        return _Chat(request, schemas.template_messages(request.messages), tools, ignored.names)

    def _prompt(self, chat: _Chat, grammar: str) -> _Prompt:
        request = chat.request
        variables = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", request.reasoning_effort)
        if grammar and self._thinks:  # reasoning would violate the grammar
            variables.setdefault("enable_thinking", False)
        continues = bool(request.continue_final_message)
        text = self.rendered(
            chat.messages,
            chat.tools,
            variables,
            add_generation_prompt=request.add_generation_prompt is not False,
            continues_last=continues,
        )
        last = chat.messages[-1]["content"] if continues else ""
        is_thinking = text.rstrip().endswith(THINK) or last.rfind(THINK) > last.rfind(THOUGHT)
        begun = text[text.rfind(HarmonyReader.START) :] if continues else ""
        return _Prompt(self.codec.encode_text(text, add_special_tokens=False), is_thinking, begun)

    def rendered(
        self,
        messages: Sequence[TemplateMessage],
        tools: Tools,
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
        continues_last: bool,
    ) -> str:
        """Return the chat as the model's template renders it. Raises InvalidRequest."""
        described: Sequence[Mapping[str, Any]] = ()
        has_calls = tools.mode != "none"
        for message in messages:
            has_calls = has_calls or message["role"] == "tool" or "tool_calls" in message
        if has_calls:
            if continues_last and messages[-1].get("tool_calls"):
                text = "a last message that calls functions cannot be continued"
                raise InvalidRequest(text, param="messages")
            messages, described = for_template(self.codec, messages, tools)
        return self.codec.chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continues_last=continues_last,
            tools=described,
            variables=variables,
        )

    def _reader(self, tools: Tools, prompt: _Prompt, *, is_held: bool) -> Callable[[], PartReader] | None:
        """With `is_held` a grammar constrains the answer, which leaves no room for reasoning."""
        writer, is_thinking = self.codec.call_format, prompt.is_thinking
        if writer is HARMONY:
            return lambda: HarmonyReader(prompt.begun)
        calls = writer.reader if tools.mode != "none" else None
        if self._thinks and not is_held:
            return lambda: ThinkingReader((calls or PlainReader)(), is_open=is_thinking)
        return calls

    def _text(self, body: bytes, ignored: Ignored) -> schemas.TextRequest:
        request = schemas.parse(schemas.TextRequest, parse_object(body))
        self._check(request, ignored)
        if (request.best_of or 1) > (request.n or 1):
            raise InvalidRequest("best_of above n is not supported", param="best_of")
        if len(request.prompts) * (request.n or 1) > self.config.max_sequences_per_request:
            limit = self.config.max_sequences_per_request
            raise InvalidRequest(f"prompts times n may be at most {limit}", param="prompt")
        return request

    def close(self) -> None:
        self.threads.close()
        self.checks.close()

    def check_fields(self, request: schemas.NamesModel, ignored: Ignored) -> None:
        """Raise ModelNotFound, UnsupportedFeature or InvalidRequest for fields that are not supported."""
        if request.model not in self.names:
            raise unknown_model(request.model, self.names)
        fields.settle(request, ignored)

    def _check(self, request: schemas.CompletionFields, ignored: Ignored) -> None:
        self.check_fields(request, ignored)
        if (options := request.stream_options) is not None:
            ignored.others(options.model_extra, type(options).model_fields, "stream_options")
        if request.stream and request.prompt_logprobs is not None:
            raise UnsupportedFeature("prompt_logprobs is not streamed", param="prompt_logprobs")
        if (request.n or 1) > self.config.max_n:
            raise InvalidRequest(f"n may be at most {self.config.max_n}", param="n")

    def encode(self, prompt: str | list[int], param: str, *, adds_special: bool = True) -> list[int]:
        """Return the prompt's tokens. Raises InvalidRequest for unknown ids."""
        if isinstance(prompt, str):
            return self.codec.encode_text(prompt, add_special_tokens=adds_special)
        if prompt and not 0 <= min(prompt) <= max(prompt) < self.codec.vocab_size:
            raise InvalidRequest(f"token ids are from 0 to {self.codec.vocab_size - 1}", param=param)
        return prompt

    def _job(
        self,
        kind: ReplyKind,
        request: schemas.CompletionRequest,
        prompts: Sequence[Sequence[int]],
        limit: int | None,
        context_tokens: int,
        grammar: str,
        ignored: tuple[str, ...],
    ) -> AdmittedRequest:
        seed = secrets.randbits(63) if request.seed is None else request.seed & SEED_MASK
        cut, samplings, given, wanted = [], [], [], request.logprobs_wanted
        if request.truncate_prompt_tokens is not None:
            prompts = [self._truncated(request, prompt, limit, context_tokens) for prompt in prompts]
        echoes = isinstance(request, schemas.TextRequest) and bool(request.echo)
        has_given = limit == 0 or echoes or request.prompt_logprobs is not None
        for at, prompt in enumerate(prompts):
            max_tokens = self.limit(
                "messages" if kind == "chat" else "prompt", len(prompt), limit, context_tokens
            )
            given.append(self._given(request, prompt, limit, at) if has_given else NOT_GIVEN)
            end = len(prompt) - given[-1].tokens
            cut.append(tuple(prompt[:end]))
            rest, temperature = prompt[end:], self.config.default_temperature
            samplings.append(sampling_of(request, self.codec, seed, max_tokens, grammar, rest, temperature))
        options = request.stream_options
        ends = () if request.ignore_eos else self.codec.end_token_ids
        return AdmittedRequest(
            kind=kind,
            prompts=tuple(cut),
            samplings=tuple(samplings),
            n=request.n or 1,
            rules=TextRules(
                stops=tuple(request.stop or ()),
                includes_stop=bool(request.include_stop_str_in_output),
                shows_special=request.skip_special_tokens is False,
                with_logprobs=wanted is not None,
                with_ids=bool(request.return_token_ids),
                min_tokens=request.min_tokens or 0,
                stop_token_ids=frozenset(request.stop_token_ids or ()).difference(ends),
            ),
            stream=bool(request.stream),
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
            cache_salt=request.cache_salt or "",
            priority=request.priority or 0,
            top_logprobs=wanted,
            given=tuple(given) if has_given else (),
            prompt_logprobs=request.prompt_logprobs,
            client_id=request.request_id,
            ignored=ignored,
            whole_prompts=tuple(prompts),
            prompt_tokens=sum(map(len, prompts)),
        )

    def _truncated(
        self, request: schemas.CompletionFields, prompt: Sequence[int], limit: int | None, context_tokens: int
    ) -> Sequence[int]:
        """Return the last `truncate_prompt_tokens` tokens of the prompt; -1: as many as fit."""
        most = request.truncate_prompt_tokens
        if most == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens should be at least 1, or -1", param="truncate_prompt_tokens"
            )
        if most == -1:
            most = max(1, context_tokens - (DEFAULT_TEXT_MAX_TOKENS if limit is None else limit))
        return prompt if most is None else prompt[-most:]

    def _given(
        self, request: schemas.CompletionRequest, prompt: Sequence[int], limit: int | None, at: int
    ) -> Given:
        """Return the forced end of the prompt: all but the first token for log-probabilities, one for
        `max_tokens: 0`."""
        echoes = isinstance(request, schemas.TextRequest) and bool(request.echo)
        wants_all = request.prompt_logprobs is not None or (echoes and request.logprobs_wanted is not None)
        if limit == 0 and len(prompt) < 2:
            raise InvalidRequest("max_tokens: 0 needs a prompt of two tokens at least", param="max_tokens")
        count = len(prompt) - 1 if wants_all else int(limit == 0)
        text = None
        if echoes and isinstance(request, schemas.TextRequest):
            asked = request.prompts[at]
            is_whole = isinstance(asked, str) and request.truncate_prompt_tokens is None
            text = str(asked) if is_whole else decode(self.codec.tokenizer, prompt)
        return Given(count, tuple(prompt) if count or echoes else (), text)

    def limit(self, param: str, prompt_tokens: int, limit: int | None, context_tokens: int) -> int:
        """Return the answer's token limit. Raises ContextOverflow, worded as clients expect."""
        if prompt_tokens == 0:
            raise InvalidRequest("the prompt has no tokens", param=param)
        left = context_tokens - prompt_tokens
        wanted = 1 if limit is None else limit
        if wanted > left:
            requested = f"{prompt_tokens} in the {param}, {wanted} in the completion"
            raise ContextOverflow(
                f"This model's maximum context length is {context_tokens} tokens. However, you requested "
                f"{prompt_tokens + wanted} tokens ({requested}). "
                f"Please reduce the length of the {param} or completion.",
                tokens=(prompt_tokens, wanted, context_tokens),
                param=param,
            )
        if limit is not None:
            return limit
        default = DEFAULT_TEXT_MAX_TOKENS if param == "prompt" else self.config.default_max_tokens
        return min(left, default or left)
