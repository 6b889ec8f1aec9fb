"""Formats of function calls: a reader and a grammar for each. The chat template shows which format a model
was trained on. Models without one get Hermes' format, described in text."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.parts.items import PartReader
from services.gateway.parts.readers import HarmonyReader, NamedReader, TaggedReader
from shared.grammars import FORM, around, inline_json, lark_grammar

MOST_CALLS = 8
"""Largest number of calls in an answer that must call functions."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    path: str = ""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One format of calls."""

    name: str
    reader: Callable[[], PartReader]
    marks: tuple[str, ...]
    """If the tokenizer has these as special tokens, the answer's text must include them."""
    begin: tuple[str, ...]
    call: Callable[[str], tuple[tuple[str, ...], tuple[str, ...]]]
    """Returns the text before and after the arguments of the named function."""
    end: tuple[str, ...] = ()
    between: tuple[str, ...] | None = ()
    """None: at most one call."""
    opening: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()
    """`opening` and `closing` surround all calls."""
    before_form: tuple[str, ...] = ()
    """Text before an answer that has a grammar and no calls."""

    def grammar(
        self,
        functions: Sequence[Function],
        special: Mapping[str, int],
        *,
        most_calls: int = MOST_CALLS,
        form: str = "",
    ) -> str:
        """Return a grammar of 1 to `most_calls` calls, or alternatively of what `form` describes. `special`
        maps the text of special tokens to ids."""
        begin, end = self._terms(self.begin, special), self._terms(self.end, special)
        rules = []
        for at, function in enumerate(functions):
            before, after = self.call(function.name)
            head, tail = self._terms(before, special), self._terms(after, special)
            rules.append(f"call_{at}: {begin} {head} {inline_json(function.parameters)} {tail} {end}")
        one = " | ".join(f"call_{at}" for at in range(len(functions)))
        calls = "call"
        if self.between is not None and most_calls > 1:
            calls += f" ({self._terms(self.between, special)} call){{0,{most_calls - 1}}}"
        whole = f"{self._terms(self.opening, special)} {calls} {self._terms(self.closing, special)}"
        start = "start: calls | reply" if form else "start: calls"
        lark = "\n".join([start, f"calls: {whole}", f"call: {one}", *rules])
        if not form:
            return lark_grammar(lark)
        return around(f"{lark}\nreply: {self._terms(self.before_form, special)} @{FORM}", form)

    def form(self, form: str, special: Mapping[str, int]) -> str:
        """Return the grammar of a whole answer whose content is `form`."""
        if not self.before_form:
            return form
        return around(f"start: {self._terms(self.before_form, special)} @{FORM}", form)

    def _terms(self, texts: Sequence[str], special: Mapping[str, int]) -> str:
        return " ".join(f"<[{special[t]}]>" if t in special else json.dumps(t) for t in texts if t)


def _object(arguments: str) -> Callable[[str], tuple[tuple[str, ...], tuple[str, ...]]]:
    return lambda name: ((f'{{"name": {json.dumps(name)}, "{arguments}": ',), ("}",))


HERMES = CallFormat(
    name="hermes",
    reader=lambda: TaggedReader("<tool_call>", ("</tool_call>",)),
    marks=("<tool_call>", "</tool_call>", "<think>", "</think>"),
    begin=("<tool_call>", "\n"),
    call=_object("arguments"),
    end=("\n", "</tool_call>"),
    between=("\n",),
)
LLAMA = CallFormat(
    name="llama",
    reader=lambda: TaggedReader("<|python_tag|>", ("<|eom_id|>", "<|eot_id|>"), bare=True),
    marks=("<|python_tag|>",),
    begin=(),
    call=_object("parameters"),
    between=("; ",),
)
MISTRAL = CallFormat(
    name="mistral",
    reader=lambda: TaggedReader("[TOOL_CALLS]", ("]",)),
    marks=("[TOOL_CALLS]",),
    begin=(),
    call=_object("arguments"),
    between=(", ",),
    opening=("[TOOL_CALLS]", "["),
    closing=("]",),
)
MISTRAL_NAMED = CallFormat(
    name="mistral_named",
    reader=NamedReader,
    marks=("[TOOL_CALLS]", "[ARGS]"),
    begin=("[TOOL_CALLS]",),
    call=lambda name: ((name, "[ARGS]"), ()),
    between=(),
)
HARMONY = CallFormat(
    name="harmony",
    reader=HarmonyReader,
    marks=("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>"),
    begin=("<|channel|>",),
    call=lambda name: ((f"commentary to=functions.{name} ", "<|constrain|>", "json", "<|message|>"), ()),
    between=None,
    before_form=("<|channel|>", "final", "<|message|>"),
)


def format_of(template: str) -> CallFormat:
    """Return the format whose marks the template contains."""
    if "<|channel|>" in template and "<|message|>" in template:
        return HARMONY
    if "[TOOL_CALLS]" in template:
        return MISTRAL_NAMED if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template:
        return HERMES
    return LLAMA if "<|python_tag|>" in template or "ipython" in template else HERMES
