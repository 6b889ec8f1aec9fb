"""Grammars that answers keep to: one library and one set of limits for whoever checks or follows them.

A gateway writes a grammar (llguidance's serialized form: JSON Schema, regular expressions, Lark) and checks
it before anything is done for the request; a worker follows it token by token. What a matcher allows next is
a function of the tokens so far alone, so an answer that goes on elsewhere goes on inside its grammar. Why
this library: docs/decisions/0022.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from shared.errors import ConfigError, InvalidRequest
from shared.tokenizer_files import TokenizerFiles

MOST_GRAMMAR_CHARS = 65_536
"""Of one request: a plan carries the grammars of all that it starts."""
_WORD_BITS = 32
_MOST_LEXER_STATES = 20_000
"""Of about 2 kB each."""
_MOST_SYMBOLS = 100_000
"""What has fewer is compiled within some 20 ms."""

_MOST_STEP_FUEL, _MOST_STEP_ITEMS = 50_000, 20_000
"""Of lexer and parser, for one mask: some milliseconds."""
_FOLLOWED_TOKENS = 16
"""Each way, by who checks a grammar: what is too large to follow mostly shows at once."""
_WAYS: tuple[Callable[[int], int], ...] = (lambda at: -1, lambda at: 0, lambda at: 7919 * (at + 1))
"""Which of the tokens that may follow are taken, by place."""
FORM = "form"
"""What a grammar is called inside another."""
WRITTEN = "written_grammar"
"""Key of a grammar in a syntax that is still to be found out."""
_OPTIONS = "x-guidance"
"""A schema's key that says how strictly it is read, among others: ours, and not the client's."""
_ON_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""A weak model would write spaces for ever, and no reader misses them."""

Words = npt.NDArray[np.uint32]
"""Bits by token id, the lowest first: `[words_of(vocabulary)]`."""


class Matcher(Protocol):
    """Where one answer stands in its grammar."""

    def accept(self, token: int) -> bool:
        """The answer's next token; False when it may not follow: from then on nothing may."""
        ...

    def mask(self, words: Words) -> None:
        """Write which tokens may follow; all bits 0 when none may."""
        ...

    @property
    def is_terminated(self) -> bool:
        """Nothing but an end token may follow."""
        ...


def words_of(vocabulary: int) -> int:
    """How many words have a bit for each token."""
    return -(-vocabulary // _WORD_BITS)


class GrammarMatcher:
    """A `Matcher` of llguidance's. Computing lets go of the interpreter lock."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def accept(self, token: int) -> bool:
        return self._matcher.consume_token(token)

    def mask(self, words: Words) -> None:
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            words[:] = 0

    @property
    def is_terminated(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def forced(self) -> Sequence[int]:
        """Tokens that follow whatever the model says; none where it has a choice."""
        found: Sequence[int] = self._matcher.compute_ff_tokens()
        return found

    @property
    def error(self) -> str:
        """Why nothing may follow; empty while something may."""
        return self._matcher.get_error().split("<non-verbose/>")[0].strip()

    def copy(self) -> "GrammarMatcher":
        """Another one that stands at the same place."""
        return GrammarMatcher(self._matcher.deep_copy())


class Grammars:
    """Compiles grammars for one vocabulary. Any thread may."""

    def __init__(self, files: TokenizerFiles, vocabulary: int | None = None) -> None:
        """`vocabulary`: logits a row has, where that is not what the folder says.

        Raises ConfigError for a tokenizer whose tokens cannot be told as bytes, or a model without an end
        token, at which no answer in a grammar would end.
        """
        self.vocabulary = vocabulary or files.vocab_size
        if not files.end_token_ids:
            raise ConfigError("a model without an end token cannot keep to a grammar", param="model")
        try:
            self._tokenizer = LLTokenizer(
                files.tokenizer.to_str(), n_vocab=self.vocabulary, eos_token=list(files.end_token_ids)
            )
        except Exception as error:  # of a library in Rust, which says anything as a ValueError or worse
            raise ConfigError(f"grammars cannot use this tokenizer: {error}", param="model") from error

    def compile(self, grammar: str) -> GrammarMatcher:
        """At the beginning of an answer. Raises InvalidRequest saying what is wrong with it."""
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
        """Of each id; those of an end token or another special one begin with 0xff."""
        return [self._tokenizer.decode_bytes([token]) for token in range(self.vocabulary)]

    @property
    def end_token_ids(self) -> Sequence[int]:
        """Those that end an answer where its grammar lets it."""
        return self._tokenizer.eos_tokens

    def check(self, grammar: str) -> None:
        """Raises InvalidRequest for what cannot be compiled, allows nothing, or takes too long to follow."""
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
    """Of the JSON texts on one line that `schema` describes."""
    return _serialized({"name": FORM, "json_schema": _on_one_line(schema)})


def regex_grammar(pattern: str) -> str:
    """Of texts that the whole pattern matches."""
    (found,) = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"]
    return _serialized({"name": FORM, "lark_grammar": found["lark_grammar"]})


def lark_grammar(text: str) -> str:
    """Of Lark's syntax as llguidance has it."""
    return _serialized({"name": FORM, "lark_grammar": text})


def written_grammar(text: str) -> str:
    """Of what a client wrote, in Lark's syntax or in GBNF. A matcher does not take it: who checks it makes a
    `lark_grammar` of it."""
    return _serialized({"name": FORM, WRITTEN: text})


def around(lark: str, form: str) -> str:
    """A Lark grammar that may say `@form` for what `form`, a grammar of this module's, describes."""
    return _serialized({"lark_grammar": lark}, *json.loads(form)["grammars"])


def inline_json(schema: Mapping[str, Any]) -> str:
    """What stands in a Lark rule for a JSON text that `schema` describes."""
    return f"%json {json.dumps(_on_one_line(schema))}"


def _on_one_line(schema: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in schema.items() if name != _OPTIONS}
    return {**plain, _OPTIONS: _ON_ONE_LINE}


def _serialized(*grammars: Mapping[str, Any]) -> str:
    return json.dumps({"grammars": grammars}, ensure_ascii=False)
