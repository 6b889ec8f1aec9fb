"""A model's tokenizer and chat template, read from a folder as Hugging Face lays it out, without torch.

`Codec` turns chats and texts into token ids and says which ids end an answer; `Vocabulary` says what a single
id stands for. Templates are Jinja in a sandbox, set up as in transformers, so that prompts are equal. Knows
nothing of requests or limits.
"""

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
from shared.tokenizer_files import TokenizerFiles, load_tokenizer

_log = get_logger("gateway.tokenizer")
ChatMessage = Mapping[str, Any]


class ChatTemplate:
    """One compiled template. `variables` are the special tokens by name (`bos_token`, …)."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        environment = template_environment()
        self._template = environment.from_string(source)
        self._variables = dict(variables)
        self.source = source
        names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        self.knows_functions = "tools" in names
        """It describes functions to the model, and writes calls and results as the model was taught."""
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
        """The prompt text, ready for the answer unless `add_generation_prompt` is off.

        With `continues_last` it ends where the content of the last message does, as in transformers.
        `variables` are the template's own besides these. Raises InvalidRequest when it refuses the messages.
        """
        if continues_last:
            last = {**messages[-1], "content": f"{messages[-1]['content']}{_CUT}"}
            whole = self.render(
                [*messages[:-1], last], add_generation_prompt=False, tools=tools, variables=variables
            )
            return _up_to_cut(whole)
        try:
            return self._template.render(
                {
                    **self._variables,
                    **(variables or {}),
                    "messages": [dict(message) for message in messages],
                    "tools": list(tools) or None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, OverflowError) as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error


_CUT = "\ue0c5cut\ue0c5 "
"""Marks where the last message ends. Its space shows whether the template trims contents."""


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
    """One thread that reads, `count` that encode, and a bound on how much waits for them, in requests and in
    bytes.

    Reading (JSON, validation) holds the interpreter lock, for hundredths of a second where a body is large.
    Two threads that do would hand it to each other, past the event loop. So there is one, and before its next
    body it rests for as long as the last one took: the event loop, which takes the lock several times to
    bring a token on its way, would otherwise wait for a body each time. Encoding releases it.
    """

    def __init__(self, count: int, max_waiting: int) -> None:
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._encoders = ThreadPoolExecutor(count, thread_name_prefix="tokenizer")
        self._max_waiting = max_waiting
        self._waiting = 0
        self._waiting_bytes = 0
        self._rested_s = 0.0

    async def read(self, work: Callable[[], T], size_bytes: int) -> T:
        """The result of `work`. Raises Overloaded when too much waits, or what `work` raises.

        `size_bytes` is of the request's body: nothing in it, be it text, tokens, messages or names of fields,
        can cost more than it is long. Little is done at once, in less time than it takes to wake a thread and
        be woken by it.
        """
        if size_bytes <= AT_ONCE_BYTES:
            return work()
        return await self._run(self._reader, lambda: self._after_a_rest(work), size_bytes)

    async def encode(self, work: Callable[[], T], size_bytes: int) -> T:
        """As `read`."""
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
        """On the reader's thread."""
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
    """Thread-safe. Encoding a long text takes long: call it off the event loop."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    end_token_ids: tuple[int, ...]
    vocab_size: int
    """Ids in a prompt given as tokens are below this."""
    forms_folder: Path | None = None
    """From which checkers of forms load the tokenizer; None: answers cannot be kept to one."""
    pools_mean: bool = False
    """The model's folder says that an embedding is the mean of all tokens' states."""
    hidden_size: int = 0
    """Numbers in an embedding; 0: the folder does not say."""

    @cached_property
    def added_tokens(self) -> Mapping[str, int]:
        """Ids of the tokens that stand for a text as a whole, by their text."""
        return {each.content: token for token, each in self.tokenizer.get_added_tokens_decoder().items()}

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        """Of those, the ones that are left out of an answer's text."""
        added = self.tokenizer.get_added_tokens_decoder().values()
        return frozenset(each.content for each in added if each.special)

    @cached_property
    def call_format(self) -> CallFormat:
        """How this model calls functions."""
        return format_of(self.template.source if self.template is not None else "")

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a plain prompt, with the special tokens the tokenizer adds to one."""
        return self._encode(text, add_special_tokens=add_special_tokens)

    def encode_chat(
        self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a chat up to where the answer begins: equal to transformers' `apply_chat_template`.

        Raises InvalidRequest when the model has no template or the template refuses the messages.
        """
        return self.encode_rendered(
            self.chat_template.render(messages, add_generation_prompt=add_generation_prompt)
        )

    @property
    def chat_template(self) -> ChatTemplate:
        """Raises InvalidRequest when the model has none."""
        if self.template is None:
            raise InvalidRequest("this model has no chat template: use /v1/completions", param="messages")
        return self.template

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of what a template has written."""
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """A batch of one: unlike `encode`, it releases the interpreter lock, and it computes no offsets."""
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids


def load_codec(model: str) -> Codec:
    """From a local folder or a hub id. Raises ConfigError naming what is missing."""
    files = load_tokenizer(model)
    source = template_source(files.folder, files.config)
    return Codec(
        tokenizer=files.tokenizer,
        template=ChatTemplate(source, files.special) if source else None,
        end_token_ids=files.end_token_ids,
        vocab_size=files.vocab_size,
        forms_folder=files.folder if _can_keep_forms(files) else None,
        pools_mean=_pools_mean(files.folder),
        hidden_size=_hidden_size(read_json(files.folder / "config.json")),
    )


def _hidden_size(config: dict[str, Any]) -> int:
    return int(config.get("hidden_size") or (config.get("text_config") or {}).get("hidden_size") or 0)


def _pools_mean(folder: Path) -> bool:
    """As sentence-transformers writes it."""
    return bool(read_json(folder / "1_Pooling" / "config.json").get("pooling_mode_mean_tokens", False))


def _can_keep_forms(files: TokenizerFiles) -> bool:
    try:
        Grammars(files)
    except ConfigError as error:
        _log.warning("structured output will be refused: %s", error)
        return False
    return True


SPACE_MARK = "▁"
"""What sentencepiece writes for a space."""


class Vocabulary:
    """The bytes of each token, and a text for people. Remembers every id it was asked for.

    The bytes of an answer's tokens, joined, are the bytes of its text (special tokens aside), also where a
    character spans tokens. Knows the two ways tokenizers keep bytes (byte-level alphabets, byte fallback);
    for any other a token's bytes are those of its decoded text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kinds = _decoder_kinds(tokenizer)
        self._added: dict[int, str] = {
            token: added.content for token, added in tokenizer.get_added_tokens_decoder().items()
        }
        self._known: dict[int, tuple[str, bytes]] = {}

    def text(self, token: int) -> str:
        """Its text; bytes that are no whole characters are written as `\\xe2`, as OpenAI does."""
        return self._look_up(token)[0]

    def bytes_of(self, token: int) -> bytes:
        """Its UTF-8 bytes, possibly a part of a character; none for an id the tokenizer does not know."""
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
    """Names of the steps of its decoder."""
    if tokenizer.decoder is None:
        return frozenset()
    state: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return frozenset(str(step.get("type")) for step in (state, *state.get("decoders", ())))


@cache
def byte_alphabet() -> dict[str, int]:
    """The 256 characters of GPT-2's byte-level alphabet: printable bytes are themselves, the rest follow
    U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
