"""Finds a model's chat template and compiles it in a sandbox set up as in transformers. Has few imports, so
that a broken template is found before a stack starts."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import ConfigError
from shared.gguf_files import is_gguf
from shared.model_files import HubId, read_json, source_of

_USER = {"role": "user", "content": "Hello"}
_TRIALS = ([_USER], [{"role": "system", "content": "Be brief."}, _USER])
_TOKENS = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "")


class _Generation(jinja2.ext.Extension):
    """Renders the content of `{% generation %}…{% endgeneration %}`, a mark of assistant text."""

    tags = {"generation"}  # noqa: RUF012 - the attribute's type is jinja2's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def template_environment() -> jinja2.Environment:
    """Return a sandbox with the filters and functions that templates expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def template_source(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        found = next((entry.get("template") for entry in found if entry.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def check_template(model: str) -> None:
    """Compile a model's chat template and render short chats. Raises ConfigError if that fails."""
    folder = source_of(model)
    if isinstance(folder, HubId):
        return
    try:
        source = template_source(folder, read_json(folder / "tokenizer_config.json"))
        problem = None if source is None else _problem(source)
    except UnicodeDecodeError as error:
        problem = str(error)
    if problem is None:
        return
    remedy = "correct chat_template.jinja, or chat_template in tokenizer_config.json"
    if is_gguf(model):
        remedy = f"write one to {Path(model).with_suffix('.jinja')}"
    text = f"the chat template of {model if is_gguf(model) else folder} cannot be used: {problem}: {remedy}"
    raise ConfigError(text, param="model")


def _problem(source: str) -> str | None:
    """Return why a template renders no chat; None if it renders one, or refuses it in its own words."""
    try:
        template = template_environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        return f"{error} (line {error.lineno})"
    problem = None
    for messages in _TRIALS:
        try:
            template.render(
                messages=messages, add_generation_prompt=True, tools=None, documents=None, **_TOKENS
            )
            return None
        except (jinja2.UndefinedError, TypeError) as error:
            problem = str(error)
        except (jinja2.TemplateError, ValueError, KeyError, OverflowError):
            return None
    return problem


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
