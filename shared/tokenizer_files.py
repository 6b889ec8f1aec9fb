"""A model's tokenizer: tokenizer.json plus token settings from the folder's other files. Used by the gateway
for prompts, and by workers for grammars. Needs no torch; needs transformers only for a folder without
tokenizer.json."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from shared.errors import ConfigError
from shared.log import get_logger
from shared.model_files import hub_reason, read_json, revision_advice, source_of

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_log = get_logger("tokenizer")


@dataclass(frozen=True)
class TokenizerFiles:
    """A model's tokenizer and token settings."""

    folder: Path
    tokenizer: Tokenizer
    config: dict[str, Any]
    """tokenizer_config.json"""
    special: dict[str, str]
    """Special tokens by name, for chat templates."""
    end_token_ids: tuple[int, ...]
    vocab_size: int
    """Number of token ids."""


def load_tokenizer(model: str) -> TokenizerFiles:
    """Load from a local folder or a hub id. Raise ConfigError naming what is missing."""
    folder = model_folder(model)
    config = read_json(folder / "tokenizer_config.json")
    tokenizer = _load_tokenizer(folder)
    special = _special_tokens(config, read_json(folder / "special_tokens_map.json"))
    _add_missing_tokens(tokenizer, config, special)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    model_config = read_json(folder / "config.json")
    return TokenizerFiles(
        folder=folder,
        tokenizer=tokenizer,
        config=config,
        special=special,
        end_token_ids=_end_token_ids(folder, model_config, tokenizer, special),
        vocab_size=model_config.get("vocab_size") or tokenizer.get_vocab_size(with_added_tokens=True),
    )


def model_folder(model: str) -> Path:
    """Return the local folder, or a downloaded snapshot of the hub id's small files. Raise ConfigError if
    there is neither."""
    source = source_of(model)
    if isinstance(source, Path):
        return source
    from huggingface_hub import snapshot_download  # takes half a second, not needed for a local folder

    try:
        folder = Path(snapshot_download(source.name, revision=source.revision, allow_patterns=list(FILES)))
    except Exception as error:  # the hub client's errors have no common base
        raise ConfigError(
            f"model {model} is no folder here, and the hub gives none: {hub_reason(error)}; name a folder or "
            "a GGUF file"
        ) from error
    advice = revision_advice(source, folder.name)  # a snapshot's folder is named after its commit
    if advice is not None:
        _log.warning(advice)
    return folder


def _load_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{path} is no tokenizer: {error}: download it again", param="model") from None
    try:
        from transformers import AutoTokenizer  # takes seconds, needed only for older formats

        return AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer
    except Exception as error:  # converters of unknown formats may raise anything
        raise ConfigError(f"{folder} has no tokenizer.json and none could be made: {error}") from error


def _text_of(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_tokens(config: dict[str, Any], older: dict[str, Any]) -> dict[str, str]:
    """Return special tokens by name, for chat templates."""
    named = {name: _text_of(config.get(name)) or _text_of(older.get(name)) for name in SPECIAL_TOKENS}
    return {name: token for name, token in named.items() if token is not None}


def _add_missing_tokens(tokenizer: Tokenizer, config: dict[str, Any], special: dict[str, str]) -> None:
    """Add tokens that only tokenizer_config.json lists; mark those that it names as special."""
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


def _end_token_ids(
    folder: Path, model_config: dict[str, Any], tokenizer: Tokenizer, special: dict[str, str]
) -> tuple[int, ...]:
    """Return the ids that end generation, from generation_config.json, config.json, or the tokenizer's eos
    token."""
    generation = read_json(folder / "generation_config.json")
    for found in (generation.get("eos_token_id"), model_config.get("eos_token_id")):
        if isinstance(found, int):
            return (found,)
        if isinstance(found, list) and found:
            return tuple(int(token) for token in found)
    eos = tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return () if eos is None else (eos,)
