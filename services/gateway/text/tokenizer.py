"""A model's tokenizer and chat template, read from a folder as Hugging Face lays it out, without torch.

`Codec` turns chats and texts into token ids and says which ids end an answer. Knows nothing of requests or
limits.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import AddedToken, Tokenizer

from services.gateway.text.chat_template import ChatMessage, ChatTemplate
from shared.errors import ConfigError, InvalidRequest, Overloaded
from shared.log import get_logger
from shared.model_files import revision_advice, source_of

T = TypeVar("T")
AT_ONCE_BYTES = 4096
MAX_WAITING_BYTES = 128 * 1024 * 1024


class TokenizerThreads:
    """One thread that reads, `count` that encode, and a bound on how much waits for them, in requests and in
    bytes.

    Reading (JSON, validation) holds the interpreter lock, for a tenth of a second where a body is large. Two
    threads that do would hand it to each other, past the event loop; one leaves it to the loop in between.
    Encoding releases it.
    """

    def __init__(self, count: int, max_waiting: int) -> None:
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._encoders = ThreadPoolExecutor(count, thread_name_prefix="tokenizer")
        self._max_waiting = max_waiting
        self._waiting = 0
        self._waiting_bytes = 0

    async def read(self, work: Callable[[], T], size_bytes: int) -> T:
        """The result of `work`. Raises Overloaded when too much waits, or what `work` raises.

        `size_bytes` is of the request's body: nothing in it, be it text, tokens, messages or names of fields,
        can cost more than it is long. Little is done at once, in less time than it takes to wake a thread and
        be woken by it.
        """
        return work() if size_bytes <= AT_ONCE_BYTES else await self._run(self._reader, work, size_bytes)

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

    def close(self) -> None:
        for threads in (self._reader, self._encoders):
            threads.shutdown(wait=False, cancel_futures=True)


SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_log = get_logger("gateway.tokenizer")
FILES = ("*.json", "*.jinja", "*.txt", "*.model")


@dataclass(frozen=True)
class Codec:
    """Thread-safe. Encoding a long text takes long: call it off the event loop."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    end_token_ids: tuple[int, ...]
    vocab_size: int
    """Ids in a prompt given as tokens are below this."""

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a plain prompt, with the special tokens the tokenizer adds to one."""
        return self._encode(text, add_special_tokens=add_special_tokens)

    def encode_chat(
        self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a chat up to where the answer begins: equal to transformers' `apply_chat_template`.

        Raises InvalidRequest when the model has no template or the template refuses the messages.
        """
        if self.template is None:
            raise InvalidRequest("this model has no chat template: use /v1/completions", param="messages")
        text = self.template.render(messages, add_generation_prompt=add_generation_prompt)
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """A batch of one: unlike `encode`, it releases the interpreter lock, and it computes no offsets."""
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids


def load_codec(model: str) -> Codec:
    """From a local folder or a hub id. Raises ConfigError naming what is missing."""
    folder = model_folder(model)
    config = _read(folder / "tokenizer_config.json")
    tokenizer = _load_tokenizer(folder)
    special = _special_tokens(config, _read(folder / "special_tokens_map.json"))
    _add_missing_tokens(tokenizer, config, special)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    model_config = _read(folder / "config.json")
    source = _template_source(folder, config)
    return Codec(
        tokenizer=tokenizer,
        template=ChatTemplate(source, special) if source else None,
        end_token_ids=_end_token_ids(folder, model_config, tokenizer, special),
        vocab_size=model_config.get("vocab_size") or tokenizer.get_vocab_size(with_added_tokens=True),
    )


def model_folder(model: str) -> Path:
    """The folder itself, or a snapshot of that hub id's small files.

    Raises ConfigError when there is neither.
    """
    source = source_of(model)
    if isinstance(source, Path):
        return source
    from huggingface_hub import snapshot_download  # half a second that a local folder does not need

    try:
        folder = Path(snapshot_download(source.name, revision=source.revision, allow_patterns=list(FILES)))
    except Exception as error:  # the hub client's errors have no common base
        raise ConfigError(
            f"model {model!r} is neither a folder nor a hub id that can be had: {error}"
        ) from error
    advice = revision_advice(source, folder.name)  # a snapshot's folder is called as its commit
    if advice is not None:
        _log.warning(advice)
    return folder


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _load_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if path.is_file():
        return Tokenizer.from_file(str(path))
    try:
        from transformers import AutoTokenizer  # seconds, needed only for older formats

        return AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer
    except Exception as error:  # whatever a converter of an unknown format raises
        raise ConfigError(f"{folder} has no tokenizer.json and none could be made: {error}") from error


def _text_of(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_tokens(config: dict[str, Any], older: dict[str, Any]) -> dict[str, str]:
    """Special tokens by name, as templates see them."""
    named = {name: _text_of(config.get(name)) or _text_of(older.get(name)) for name in SPECIAL_TOKENS}
    return {name: token for name, token in named.items() if token is not None}


def _add_missing_tokens(tokenizer: Tokenizer, config: dict[str, Any], special: dict[str, str]) -> None:
    """Tokens that only tokenizer_config.json knows; those it names as special become so."""
    for entry in config.get("added_tokens_decoder", {}).values():
        if (text := _text_of(entry)) and tokenizer.token_to_id(text) is None:
            flags = {name: entry[name] for name in ("lstrip", "rstrip", "normalized") if name in entry}
            token = AddedToken(text, special=bool(entry.get("special")), **flags)
            (tokenizer.add_special_tokens if entry.get("special") else tokenizer.add_tokens)([token])
    more = [_text_of(token) for token in config.get("additional_special_tokens") or ()]
    wanted = [*special.values(), *(token for token in more if token)]
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in wanted if t not in known]
    )


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        found = next((entry.get("template") for entry in found if entry.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _end_token_ids(
    folder: Path, model_config: dict[str, Any], tokenizer: Tokenizer, special: dict[str, str]
) -> tuple[int, ...]:
    """What `generate` would stop at: generation_config.json, else config.json, else the tokenizer's eos
    token.
    """
    generation = _read(folder / "generation_config.json")
    for found in (generation.get("eos_token_id"), model_config.get("eos_token_id")):
        if isinstance(found, int):
            return (found,)
        if isinstance(found, list) and found:
            return tuple(int(token) for token in found)
    eos = tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return () if eos is None else (eos,)
