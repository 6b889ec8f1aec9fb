"""A model's tokenizer and chat template, read from a Hugging Face folder without torch. `Codec` encodes chats
and texts; `Vocabulary` returns the bytes of single tokens. Templates are sandboxed Jinja, set up as in
transformers, so that prompts are equal."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import jinja2.meta
from tokenizers import Tokenizer

from services.gateway.parts.formats import CallFormat, format_of
from services.gateway.text.templates import template_environment, template_source
from shared.clock import monotonic_s
from shared.errors import ConfigError, InvalidRequest, Overloaded
from shared.grammars import Grammars
from shared.log import get_logger
from shared.model_files import read_json
from shared.tokenizer_files import load_tokenizer

_log = get_logger("gateway.tokenizer")
ChatMessage = Mapping[str, Any]


class ChatTemplate:
    """One compiled template. `variables` holds the special tokens by name (`bos_token`, …)."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        environment = template_environment()
        self._template = environment.from_string(source)
        self._variables = dict(variables)
        self.source = source
        names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        self.knows_functions = "tools" in names
        """The template handles function descriptions, calls and results."""
        self.thinks = "</think>" in source

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continues_last: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text, ready for the answer unless `add_generation_prompt` is off. With
        `continues_last` it ends with the last message's content, as in transformers. `variables` are the
        template's additional ones. Raises InvalidRequest when the template refuses the messages."""
        if continues_last:
            last = {**messages[-1], "content": f"{messages[-1]['content']}{_CUT}"}
            messages, add_generation_prompt = [*messages[:-1], last], False
        more = {
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        given = {**self._variables, **(variables or {}), **more}
        try:
            text = self._template.render({**given, "messages": list(map(dict, messages))})
        except _REFUSALS as refusal:
            text = self._render_joined(messages, given, refusal)
        return _up_to_cut(text) if continues_last else text

    def _render_joined(
        self, messages: Sequence[ChatMessage], given: Mapping[str, Any], refusal: Exception
    ) -> str:
        """Render for a template with one system message and alternating roles."""
        joined = _system_first(messages)
        try:
            if joined == list(messages):
                raise refusal
            return self._template.render({**given, "messages": joined})
        except _REFUSALS as error:
            text = f"the model's chat template refuses these messages: {error}"
            raise InvalidRequest(text, param="messages") from error


_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, KeyError, OverflowError)


def _system_first(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Join leading system messages, make later ones the user's, and join successive user messages."""
    joined: list[ChatMessage] = []
    for message in messages:
        role = message["role"]
        if role == "system" and any(before["role"] != "system" for before in joined):
            role = "user"
        if joined and joined[-1]["role"] == role and role in ("system", "user"):
            joined[-1] = {**joined[-1], "content": f"{joined[-1]['content']}\n\n{message['content']}"}
        else:
            joined.append({**message, "role": role})
    return joined


_CUT = "\ue0c5cut\ue0c5 "
"""Marks where the last message ends. The trailing space shows whether the template trims contents."""


def _up_to_cut(text: str) -> str:
    at = text.rfind(_CUT.strip())
    if at < 0:
        why = "the model's chat template does not write this last message: it cannot be continued"
        raise InvalidRequest(why, param="messages")
    return text[:at] if text.startswith(_CUT, at) else text[:at].rstrip()


T = TypeVar("T")
AT_ONCE_BYTES = 4096
MAX_WAITING_BYTES = 128 * 1024 * 1024


class TokenizerThreads:
    """One reader thread and `count` encoder threads, with limits on waiting requests and bytes. Reading holds
    the interpreter lock, so the one reader rests after each body for as long as the body took."""

    def __init__(self, count: int, max_waiting: int) -> None:
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._encoders = ThreadPoolExecutor(count, thread_name_prefix="tokenizer")
        self._max_waiting = max_waiting
        self._waiting = 0
        self._waiting_bytes = 0
        self._rested_s = 0.0

    async def read(self, work: Callable[[], T], size_bytes: int) -> T:
        """Return the result of `work`. Raises Overloaded when too much is waiting, or what `work` raises.
        `size_bytes`, the body's length, bounds the cost. Small bodies run inline: waking a thread takes
        longer."""
        if size_bytes <= AT_ONCE_BYTES:
            return work()
        return await self._run(self._reader, lambda: self._after_a_rest(work), size_bytes)

    async def encode(self, work: Callable[[], T], size_bytes: int) -> T:
        """Like `read`, on an encoder thread."""
        return work() if size_bytes <= AT_ONCE_BYTES else await self._run(self._encoders, work, size_bytes)

    async def _run(self, threads: ThreadPoolExecutor, work: Callable[[], T], size_bytes: int) -> T:
        is_too_much = self._waiting_bytes + size_bytes > MAX_WAITING_BYTES and self._waiting > 0
        if is_too_much or self._waiting >= self._max_waiting:
            raise Overloaded("too many requests are waiting to be tokenized: try again", retry_after_s=1.0)
        self._waiting += 1
        self._waiting_bytes += size_bytes
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, work)
        finally:
            self._waiting -= 1
            self._waiting_bytes -= size_bytes

    def _after_a_rest(self, work: Callable[[], T]) -> T:
        """Runs on the reader thread, after a pause as long as the last body took."""
        time.sleep(max(0.0, self._rested_s - monotonic_s()))
        began_s = time.thread_time()
        try:
            return work()
        finally:
            self._rested_s = monotonic_s() + time.thread_time() - began_s

    def close(self) -> None:
        for threads in (self._reader, self._encoders):
            threads.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class Codec:
    """A model's tokenizer and template. Thread-safe; encode long texts off the event loop."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    end_token_ids: tuple[int, ...]
    vocab_size: int
    """Upper bound, exclusive, of token ids in a prompt."""
    forms_folder: Path | None = None
    """Folder of the tokenizer that grammar checkers load; None: no structured output."""
    pools_mean: bool = False
    """The model's folder asks for embeddings that are the mean over all tokens."""
    hidden_size: int = 0
    """Length of an embedding; 0: unknown."""

    @cached_property
    def added_tokens(self) -> Mapping[str, int]:
        """Ids of added tokens by their text."""
        return {each.content: token for token, each in self.tokenizer.get_added_tokens_decoder().items()}

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        """Added tokens that are left out of an answer's text."""
        added = self.tokenizer.get_added_tokens_decoder().values()
        return frozenset(each.content for each in added if each.special)

    @cached_property
    def call_format(self) -> CallFormat:
        """The model's format of function calls."""
        return format_of(self.template.source if self.template is not None else "")

    @property
    def chat_template(self) -> ChatTemplate:
        """The template. Raises InvalidRequest when the model has none."""
        if self.template is None:
            raise InvalidRequest("this model has no chat template: use /v1/completions", param="messages")
        return self.template

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a plain prompt, with the tokenizer's special tokens. A batch of one releases the
        interpreter lock and computes no offsets."""
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids


def load_codec(model: str) -> Codec:
    """Load from a local folder or a hub id. Raises ConfigError naming what is missing."""
    files = load_tokenizer(model)
    source = template_source(files.folder, files.config)
    config = read_json(files.folder / "config.json")
    pooling = read_json(files.folder / "1_Pooling" / "config.json")
    inner = config.get("text_config") or {}
    folder: Path | None = files.folder
    try:
        Grammars(files)
    except ConfigError as error:
        _log.warning("structured output will be refused: %s", error)
        folder = None
    return Codec(
        tokenizer=files.tokenizer,
        template=ChatTemplate(source, files.special) if source else None,
        end_token_ids=files.end_token_ids,
        vocab_size=files.vocab_size,
        forms_folder=folder,
        pools_mean=bool(pooling.get("pooling_mode_mean_tokens", False)),
        hidden_size=int(config.get("hidden_size") or inner.get("hidden_size") or 0),
    )


SPACE_MARK = "▁"


class Vocabulary:
    """Bytes and display text of each token, cached. The joined bytes of an answer's tokens are the bytes of
    its text (special tokens aside), even where a character spans tokens. Supports byte-level alphabets and
    byte fallback; for other tokenizers, the bytes are those of the decoded text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kinds = _decoder_kinds(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._added: dict[int, str] = {token: each.content for token, each in added.items()}
        self._known: dict[int, tuple[str, bytes]] = {}

    def text(self, token: int) -> str:
        """Return the token's text; incomplete characters are escaped as `\\xe2`, as OpenAI does."""
        return self._look_up(token)[0]

    def bytes_of(self, token: int) -> bytes:
        """Return the token's UTF-8 bytes, possibly part of a character; empty for an unknown id."""
        return self._look_up(token)[1]

    def _look_up(self, token: int) -> tuple[str, bytes]:
        known = self._known.get(token)
        if known is None:
            data = self._bytes(token)
            known = (data.decode("utf-8", "backslashreplace"), data)
            if self._tokenizer.id_to_token(token) is not None:
                self._known[token] = known
        return known

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        written: str | None = self._tokenizer.id_to_token(token)
        if written is None:
            return b""
        if "ByteLevel" in self._kinds:
            alphabet = byte_alphabet()
            return b"".join(bytes([alphabet[c]]) if c in alphabet else c.encode() for c in written)
        if "ByteFallback" in self._kinds and len(written) == 6 and written.startswith("<0x"):
            return bytes([int(written[3:5], 16)])
        if self._kinds & {"ByteFallback", "Metaspace"}:
            return written.replace(SPACE_MARK, " ").encode()
        decoded: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return decoded.encode()


def _decoder_kinds(tokenizer: Tokenizer) -> frozenset[str]:
    if tokenizer.decoder is None:
        return frozenset()
    state: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return frozenset(str(step.get("type")) for step in (state, *state.get("decoders", ())))


@cache
def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's byte-level alphabet: printable bytes map to themselves, others to U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
