"""Which fields a request may have: honoured, refused by name if ignoring it would change the answer, or else
without effect. `python -m services.gateway.openai.fields` prints docs/fields.md."""

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from pydantic import BaseModel

from services.gateway.errors import UnsupportedFeature, shown
from services.gateway.openai.schemas import MAX_STOPS, ChatRequest, EmbeddingRequest, TextRequest
from shared.errors import InvalidRequest

DESCRIPTIONS: Mapping[str, str] = {
    "model": "the name that `/v1/models` lists",
    "messages": "of `system`, `developer`, `user`, `assistant` and `tool`; content is a text, or text parts",
    "prompt": "a text, a list of token ids, or a list of either",
    "max_tokens": "longest answer; 0: none, only the prompt is computed",
    "max_completion_tokens": "the same, and first",
    "n": "answers to each prompt",
    "temperature": "0 is greedy",
    "top_p": "nucleus sampling",
    "top_k": "0 or -1 is off",
    "seed": "the same seed gives the same answer",
    "stop": f"up to {MAX_STOPS} texts that end the answer",
    "stream": "send events",
    "stream_options": "`include_usage`, and with it `continuous_usage_stats`: in every chunk",
    "ignore_eos": "go on past the end token",
    "cache_salt": "share stored prefixes with the same salt only",
    "priority": "lower goes first, before what waits with a higher one under the same key; 0 is the default",
    "presence_penalty": "off the logit of each token that the answer has",
    "frequency_penalty": "the same, each time it has it",
    "repetition_penalty": "divides logits of tokens in prompt and answer",
    "min_p": "least share of the likeliest token's probability",
    "min_tokens": "the answer does not end before, nor does a stop text count that it has by then",
    "stop_token_ids": "tokens that end the answer",
    "logit_bias": "added to logits, by token id",
    "allowed_token_ids": "no others are chosen",
    "bad_words": "texts that the answer does not have",
    "include_stop_str_in_output": "show the stop text, or the stop token of yours, that ended the answer",
    "skip_special_tokens": "false: show special tokens in the text",
    "truncate_prompt_tokens": "keep only so many at the prompt's end; -1: as many as fit",
    "prompt_logprobs": "log-probabilities of the prompt's tokens and so many likeliest ones; slow",
    "request_id": "the answer's id; as the header `X-Request-Id`",
    "return_token_ids": "`token_ids` of the answer, and `prompt_token_ids`",
    "add_generation_prompt": "false: the prompt does not open an answer of the assistant",
    "continue_final_message": "the answer goes on where the last message ends (prefill)",
    **dict.fromkeys(("response_format", "structured_outputs"), "[a form](structured-output.md)"),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice"), "[a form](structured-output.md)"),
    **dict.fromkeys(("guided_grammar", "guided_json_object"), "[a form](structured-output.md)"),
    "logprobs": "of chats: true; of completions: how many of the likeliest tokens, too",
    "top_logprobs": "how many of the likeliest tokens",
    "tools": "[functions](tool-calls.md)",
    "tool_choice": "[which must be called](tool-calls.md)",
    "parallel_tool_calls": "false: one call at most, where calls are required",
    "reasoning_effort": "goes to the chat template",
    "chat_template_kwargs": "go to the chat template",
    "best_of": "at most `n`",
    "echo": "begin with the prompt",
    "input": "as `prompt`, 2,048 of them at most: each gets a vector of length one",
    "encoding_format": "of vectors: `float`, or `base64` of little-endian fp32",
    "dimensions": "only so many numbers of each vector, scaled to length one again",
    "add_special_tokens": "false: the prompt as it is, without a begin token",
}
"""Effect of each honoured field, for the table in the docs and /openapi.json."""


Neutral = Callable[[Any], bool]


def _is_empty(value: Any) -> bool:
    return value is None or value is False or value in ("", "none", [], {})


def _is(*values: Any) -> Neutral:
    return lambda value: value is None or value in values


_CHATS, _FORMS = "it goes with /v1/chat/completions", "send response_format, or text.format to /v1/responses"
REFUSED: Mapping[str, tuple[Neutral, str]] = {
    "functions": (_is_empty, "send them as tools"),
    "function_call": (_is("none", "auto"), "send it as tool_choice"),
    "top_logprobs": (_is(0), "here the number goes into logprobs, from 0 to 5"),  # of completions
    "best_of": (_is(1), ""),  # of chats; completions have it
    "grammar": (_is_empty, "send it as structured_outputs.grammar"),
    "logits_processors": (_is_empty, ""),
    "chat_template": (_is_empty, "the model's own is used; chat_template_kwargs go to it"),
    "documents": (_is_empty, "put them into a message"),
    "dimensions": (_is_empty, "it goes with /v1/embeddings"),
    "length_penalty": (_is(1), ""),
    "audio": (_is_empty, ""),
    "modalities": (lambda value: value is None or value == ["text"], ""),
    "suffix": (_is_empty, ""),
    "echo": (_is_empty, "it goes with /v1/completions"),
    "tools": (_is_empty, "they go with /v1/chat/completions"),
    "return_tokens_as_token_ids": (_is_empty, ""),
    "use_beam_search": (_is_empty, ""),
    "continue_final_message": (_is_empty, _CHATS),
    "add_generation_prompt": (_is(True), _CHATS),
    "guided_whitespace_pattern": (_is_empty, "JSON is written with single spaces and indented lines at most"),
    "n": (_is(1), ""),
    "stop": (_is_empty, "send stop_sequences to /v1/messages; /v1/responses has none"),
    "stop_sequences": (_is_empty, "send stop"),
    "max_tokens": (_is_empty, "send max_output_tokens"),
    "max_completion_tokens": (_is_empty, "send max_tokens, or max_output_tokens to /v1/responses"),
    "max_output_tokens": (_is_empty, "send max_tokens"),
    "response_format": (_is_empty, "send text.format to /v1/responses, output_config.format to /v1/messages"),
    "output_format": (_is_empty, _FORMS),
}
"""Fields that every API refuses unless it has them or the value asks for nothing, and what to do instead."""
ELSEWHERE = frozenset(
    {"n", "stop", "stop_sequences", "max_tokens", "max_completion_tokens", "max_output_tokens"}
    | {"response_format", "output_format"}
)
"""Those of one API that decide how many answers there are, where they end and in which form."""

IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "moderation", "prediction"}
    | {"prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"}
    | {"guided_decoding_backend", "spaces_between_special_tokens", "include_reasoning"}
    | {"keep_alive", "cache_prompt"}
    | {"verbosity", "web_search_options"}
)
"""Hints, bookkeeping and hosted tools of OpenAI's own service: accepted without effect."""

RESPONSES_IGNORED = frozenset(
    {"metadata", "user", "service_tier", "prompt_cache_key", "prompt_cache_retention", "include"}
    | {"safety_identifier", "max_tool_calls", "stream_options", "truncation", "moderation"}
    | {"client_metadata", "prompt_cache_options"}
)
"""The same of the Responses API; Codex sends `client_metadata`."""
MESSAGES_IGNORED = frozenset(
    {"metadata", "service_tier", "container", "context_management", "inference_geo", "betas", "mcp_servers"}
    | {"thread"}
)
"""The same of Anthropic's API; its SDK's `tool_runner` sends `thread`."""
ECHOED = frozenset({"refusal", "annotations", "reasoning", "reasoning_details", "cache_control"})
"""Fields of answers that clients send back in messages."""


MOST_IGNORED = 32


class Ignored:
    """Names of one request's fields and tools that have no effect."""

    def __init__(self, *, is_strict: bool = False) -> None:
        """With `is_strict`, unknown fields are refused."""
        self._is_strict = is_strict
        self.names: tuple[str, ...] = ()

    def note(self, name: str) -> None:
        if len(self.names) < MOST_IGNORED and name[:64] not in self.names:
            self.names += (name[:64],)

    def others(
        self,
        fields: Mapping[str, Any] | None,
        known: Collection[str],
        path: str = "",
        without_effect: Collection[str] = (),
    ) -> None:
        """Note fields of the object at `path` that are not `known`, unless their value is empty. If strict,
        raises InvalidRequest for fields that are not in `without_effect` either; it suggests a known name."""
        for name, value in (fields or {}).items():
            asks_for_nothing = value is None or value in ("", [], {})
            if name in known or asks_for_nothing or (value is False and name in without_effect):
                continue
            where = f"{path}.{name}" if path else name
            if self._is_strict and name not in without_effect:
                close = difflib.get_close_matches(name[:64], [*known, *without_effect], n=1)
                meant = f": is {close[0]} meant?" if close else "; leave it out"
                raise InvalidRequest(f"there is no field {shown(where, 64)!r}{meant}", param=shown(where, 64))
            self.note(where)

    def tool(self, kind: Any, path: str) -> None:
        """Note a tool that is not a function. Raises UnsupportedFeature if strict."""
        if self._is_strict:
            text = f"tools of type {shown(repr(kind), 100)} are not supported: only functions are"
            raise UnsupportedFeature(text, param=f"{path}.type")
        self.note(f"tools.{kind}")


def refuse_unsupported(fields: Mapping[str, Any], but: Collection[str] = ()) -> None:
    """Raise UnsupportedFeature naming the first field that asks for something this server does not do."""
    for name, value in fields.items():
        is_neutral, instead = REFUSED.get(name, (None, ""))
        if is_neutral is not None and name not in but and not is_neutral(value):
            advice = f": {instead}" if instead else "; leave it out"
            raise UnsupportedFeature(f"{name} is not supported by this server{advice}", param=name)


def settle(request: BaseModel, ignored: Ignored, without_effect: Collection[str] = IGNORED) -> None:
    """Refuse or ignore each field of a body that `request`'s schema does not have. Raises UnsupportedFeature
    and InvalidRequest naming the field."""
    if extra := request.model_extra:
        refuse_unsupported(extra)
        others = {name: value for name, value in extra.items() if name not in REFUSED}
        ignored.others(others, type(request).model_fields, without_effect=without_effect)


REQUESTS = (ChatRequest, TextRequest, EmbeddingRequest)


def table() -> str:
    """Every field in Markdown."""
    lines = [_HEAD, "| field | chat | completions | embeddings | |", "|---|---|---|---|---|"]
    for name in sorted({name for each in REQUESTS for name in each.model_fields}):
        places = ["yes" if name in each.model_fields else "" for each in REQUESTS]
        lines.append(f"| `{name}` | {' | '.join(places)} | {DESCRIPTIONS[name]} |")
    lines += ["", "No effect, named in `x-kvasir-ignored`, and accepted by `refuse` as well:", ""]
    for endpoints, names in (
        ("chat, completions and embeddings", IGNORED),
        ("`POST /v1/responses`", RESPONSES_IGNORED),
        ("`POST /v1/messages`", MESSAGES_IGNORED),
    ):
        lines.append(f"- {endpoints}: " + ", ".join(f"`{name}`" for name in sorted(names)))
    lines += ["", "Refused by every API that does not have the field, unless the value asks for nothing:", ""]
    lines += ["| field | instead |", "|---|---|"]
    lines += [f"| `{name}` | {instead} |" for name, (_, instead) in sorted(REFUSED.items())]
    return "\n".join(lines) + "\n"


_HEAD = """# Fields of a request

Fields of `POST /v1/chat/completions`, `POST /v1/completions` and `POST /v1/embeddings`. `/v1/rerank` and
`/v1/score` answer 501: Kvasir serves no rerankers.

A field that is in none of these tables has no effect, at the top of a body and in the objects inside it. The
answer's header `x-kvasir-ignored` names up to 32 such fields, and the metric `kvasir_gateway_ignored_total`
counts them by name. The same holds for `POST /v1/responses` and `POST /v1/messages`, and for tools that are
not functions (`tools.web_search`). With `gateway.unknown_fields: refuse` such a request gets a 400 that names
the field that may be meant.

This file is made by `python -m services.gateway.openai.fields > docs/fields.md`.
"""

if __name__ == "__main__":
    print(table(), end="")
