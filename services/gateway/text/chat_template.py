"""The chat template of a model: Jinja in a sandbox, set up as in transformers, so that prompts are equal.

Knows messages and special tokens; does not tokenize.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import InvalidRequest

ChatMessage = Mapping[str, Any]


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant wrote, for training; here it is its
    content.
    """

    tags = {"generation"}  # noqa: RUF012 - the attribute's type is jinja2's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. `variables` are the special tokens by name (`bos_token`, …)."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._variables = dict(variables)

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> str:
        """The prompt text, ready for the answer unless `add_generation_prompt` is off.

        Raises InvalidRequest when the template refuses the messages.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, OverflowError) as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
