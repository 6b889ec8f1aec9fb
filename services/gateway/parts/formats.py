"""The format in which a model calls functions: how to read it, and a grammar that it is held to.

Which one a model was taught shows in its chat template. Models whose template knows no functions are told
about them in words, and get Hermes' format. Knows no requests.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.parts.items import PartReader
from services.gateway.parts.readers import HarmonyReader, NamedReader, TaggedReader
from shared.grammars import FORM, around, inline_json, lark_grammar

MOST_CALLS = 8
"""In one answer that has to call functions."""


@dataclass(frozen=True, slots=True)
class Function:
    """What a model may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """A JSON schema of an object."""
    path: str = ""
    """Where the request has it."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way to write calls."""

    name: str
    reader: Callable[[], PartReader]
    marks: tuple[str, ...]
    """Of these, those that the tokenizer has as special tokens must not be left out of an answer's text."""
    begin: tuple[str, ...]
    """Before each call: texts and marks."""
    call: Callable[[str], tuple[tuple[str, ...], tuple[str, ...]]]
    """What stands before and after the arguments of a function of that name."""
    end: tuple[str, ...] = ()
    between: tuple[str, ...] | None = ()
    """None: there is never more than one call."""
    opening: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()
    """Around all calls."""
    before_form: tuple[str, ...] = ()
    """Before an answer that is held to a form and calls nothing."""

    def grammar(
        self,
        functions: Sequence[Function],
        special: Mapping[str, int],
        *,
        most_calls: int = MOST_CALLS,
        form: str = "",
        is_free: bool = False,
    ) -> str:
        """Of one to `most_calls` calls of `functions`; with `form`, or of what that describes.

        `special`: ids of special tokens by their text.
        """
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
        """The form as this model writes an answer."""
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
    """By the marks in a chat template's source."""
    if "<|channel|>" in template and "<|message|>" in template:
        return HARMONY
    if "[TOOL_CALLS]" in template:
        return MISTRAL_NAMED if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template:
        return HERMES
    if "<|python_tag|>" in template or "ipython" in template:
        return LLAMA
    return HERMES
