"""Grammars that constrain answers: one library and one set of limits for checking and following them.

The gateway writes a grammar in llguidance's serialized form (JSON Schema, regular expressions, Lark) and
checks it before accepting the request. The worker follows it token by token. A matcher's state depends only
on the tokens so far, so a sequence resumed elsewhere stays within its grammar. Choice of library:
docs/decisions/0022.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from shared.errors import ConfigError, InvalidRequest
from shared.tokenizer_files import TokenizerFiles

MOST_GRAMMAR_CHARS = 65_536
"""Limit per request; a plan carries the grammars of all sequences that it starts."""
_WORD_BITS = 32
_MOST_LEXER_STATES = 20_000
"""About 2 kB each."""
_MOST_SYMBOLS = 100_000
"""Smaller grammars compile within about 20 ms."""

_MOST_STEP_FUEL, _MOST_STEP_ITEMS = 50_000, 20_000
"""Lexer and parser limits for one mask: a few milliseconds."""
_FOLLOWED_TOKENS = 16
"""Number of tokens to follow per choice when checking a grammar; oversized ones mostly fail at once."""
_WAYS: tuple[Callable[[int], int], ...] = (lambda at: -1, lambda at: 0, lambda at: 7919 * (at + 1))
"""Rules that choose among allowed tokens, by position."""
FORM = "form"
"""Name of a grammar embedded in another one."""
WRITTEN = "written_grammar"
"""Key of a grammar whose syntax is not determined yet."""
_OPTIONS = "x-guidance"
"""Schema key for parser options; the client's value is dropped."""
_ON_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""Weak models would otherwise emit endless whitespace."""

Words = npt.NDArray[np.uint32]
"""Bit mask by token id, lowest bit first: `[words_of(vocabulary)]`."""


def words_of(vocabulary: int) -> int:
    """Return the number of mask words for a vocabulary."""
    return -(-vocabulary // _WORD_BITS)


class GrammarMatcher:
    """Position of one answer in its grammar. Computing a mask releases the interpreter lock."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def accept(self, token: int) -> bool:
        """Consume the next token. Return False if it is not allowed; the matcher is unusable afterwards."""
        return self._matcher.consume_token(token)

    def mask(self, words: Words) -> None:
        """Write the mask of allowed tokens; all bits 0 if there is none."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            words[:] = 0

    @property
    def is_terminated(self) -> bool:
        """True if only an end token may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def forced(self) -> Sequence[int]:
        """Return the tokens that must follow; empty if the model has a choice."""
        found: Sequence[int] = self._matcher.compute_ff_tokens()
        return found

    @property
    def error(self) -> str:
        """Reason why no token may follow; empty if some may."""
        return self._matcher.get_error().split("<non-verbose/>")[0].strip()

    def copy(self) -> "GrammarMatcher":
        """Return an independent matcher at the same position."""
        return GrammarMatcher(self._matcher.deep_copy())


class Grammars:
    """Compiles grammars for one vocabulary. Thread-safe."""

    def __init__(self, files: TokenizerFiles, vocabulary: int | None = None) -> None:
        """Set `vocabulary`, the number of logits, if the model folder's value does not apply. Raise
        ConfigError if the tokenizer cannot map tokens to bytes, or if the model has no end token."""
        self.vocabulary = vocabulary or files.vocab_size
        if not files.end_token_ids:
            raise ConfigError("a model without an end token cannot keep to a grammar", param="model")
        try:
            self._tokenizer = LLTokenizer(
                files.tokenizer.to_str(), n_vocab=self.vocabulary, eos_token=list(files.end_token_ids)
            )
        except Exception as error:  # the Rust library raises ValueError or worse
            raise ConfigError(f"grammars cannot use this tokenizer: {error}", param="model") from error

    def compile(self, grammar: str) -> GrammarMatcher:
        """Return a matcher at the start of an answer. Raise InvalidRequest saying what is wrong."""
        if len(grammar) > MOST_GRAMMAR_CHARS:
            raise InvalidRequest(
                f"the grammar has {len(grammar)} characters; at most {MOST_GRAMMAR_CHARS} are taken"
            )
        limits = LLParserLimits(
            max_lexer_states=_MOST_LEXER_STATES,
            max_grammar_size=_MOST_SYMBOLS,
            step_lexer_fuel=_MOST_STEP_FUEL,
            step_max_items=_MOST_STEP_ITEMS,
            verbose_errors=False,
        )
        matcher = GrammarMatcher(LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits))
        if matcher.error:
            raise InvalidRequest(matcher.error)
        return matcher

    def token_bytes(self) -> list[bytes]:
        """Return the bytes of each token; special tokens begin with 0xff."""
        return [self._tokenizer.decode_bytes([token]) for token in range(self.vocabulary)]

    @property
    def end_token_ids(self) -> Sequence[int]:
        """Token ids that end an answer where the grammar allows."""
        return self._tokenizer.eos_tokens

    def check(self, grammar: str) -> None:
        """Raise InvalidRequest if the grammar does not compile, allows nothing, or is too slow to follow."""
        words = np.zeros(words_of(self.vocabulary), dtype=np.uint32)
        begun = self.compile(grammar)
        for choose in _WAYS:
            matcher = begun.copy()
            for at in range(_FOLLOWED_TOKENS):
                matcher.mask(words)
                allowed = np.flatnonzero(words)
                if not len(allowed):
                    raise InvalidRequest(matcher.error or "the grammar allows no answer")
                word = int(allowed[choose(at) % len(allowed)])
                matcher.accept(word * _WORD_BITS + int(words[word]).bit_length() - 1)
                if matcher.is_terminated:
                    break


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Return the grammar of single-line JSON texts that match `schema`."""
    return _serialized({"name": FORM, "json_schema": _on_one_line(schema)})


def regex_grammar(pattern: str) -> str:
    """Return the grammar of texts that the whole pattern matches."""
    (found,) = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"]
    return _serialized({"name": FORM, "lark_grammar": found["lark_grammar"]})


def lark_grammar(text: str) -> str:
    """Return the grammar of llguidance's Lark syntax."""
    return _serialized({"name": FORM, "lark_grammar": text})


def written_grammar(text: str) -> str:
    """Wrap a client's grammar in Lark syntax or GBNF. Matchers do not accept it; its checker converts it with
    `lark_grammar`."""
    return _serialized({"name": FORM, WRITTEN: text})


def around(lark: str, form: str) -> str:
    """Return a Lark grammar in which `@form` refers to `form`, another grammar of this module."""
    return _serialized({"lark_grammar": lark}, *json.loads(form)["grammars"])


def inline_json(schema: Mapping[str, Any]) -> str:
    """Return a Lark term for JSON texts that match `schema`."""
    return f"%json {json.dumps(_on_one_line(schema))}"


def _on_one_line(schema: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in schema.items() if name != _OPTIONS}
    return {**plain, _OPTIONS: _ON_ONE_LINE}


def _serialized(*grammars: Mapping[str, Any]) -> str:
    return json.dumps({"grammars": grammars}, ensure_ascii=False)
