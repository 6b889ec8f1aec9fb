"""Load the configuration: defaults < YAML file < environment < flags.

The file has a section per service; `bus`, `traces`, `log_level` and `log_format` may stand beside them.
Variables are named like `KVASIR_GATEWAY__PORT` and `KVASIR_BUS__URL`; flags like `--port` and `--bus.url`. An
invalid setting raises ConfigError with its name.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, EnvSettingsSource, SettingsError

from shared import subjects
from shared.command_line import hint
from shared.config.models import ENV_PREFIX, BusConfig, ServiceConfig, TracesConfig
from shared.errors import ConfigError


def explain(
    error: ValidationError, config_type: type[BaseModel], section: str, origins: Mapping[str, str]
) -> str:
    """Describe all invalid settings: value, origin, and how to set them. Secrets are not shown."""
    problems: list[str] = []
    for detail in error.errors(include_url=False):
        names = [str(part) for part in detail["loc"]]
        path = ".".join(names)
        where = f" in {origins[path]}" if path in origins else ""
        if detail["type"] == "extra_forbidden":
            problems.append(f"{path}: no such setting{where}{_meant(config_type, names)}")
            continue
        variable = f"{ENV_PREFIX}{section}__{path.replace('.', '__')}".upper()
        problems.append(
            f"{path or section}: {detail['msg']}{_shown(path, detail['input'])}{where}"
            f" (set {section}.{path} in the file or with `up --set`, {variable}, or --{path})"
        )
    return "; ".join(problems)


def _shown(path: str, value: object) -> str:
    """Return the given value as text, empty for a secret or a non-scalar."""
    is_secret = any(word in path for word in ("password", "secret", "key", "token"))
    if is_secret or not isinstance(value, str | int | float) or len(str(value)) > 80:
        return ""
    return f"; got {value!r}"


def _meant(model: type[BaseModel], path: Sequence[str]) -> str:
    """Return what to write instead of an unknown setting."""
    for name in path[:-1]:
        field = model.model_fields.get(name)
        inner = _inner_model(field.annotation) if field else None
        if inner is None:
            return ""
        model = inner
    return _moved(model, path[-1]) or hint(path[-1], tuple(model.model_fields))


def _moved(model: type[BaseModel], name: str) -> str:
    """Return where an earlier setting went, by the model's `MOVED`; empty: it never existed."""
    moved: Mapping[str, str] = getattr(model, "MOVED", {})
    return f"; write {moved[name]}" if name in moved else ""


def check_setting(
    model: type[BaseModel], names: Sequence[str], as_typed: Callable[[Sequence[str]], str]
) -> None:
    """Raise ConfigError for an unknown setting, or one below a plain value. `as_typed` formats a path as the
    user wrote it."""
    for depth, name in enumerate(names, 1):
        so_far = as_typed(names[:depth])
        if name not in model.model_fields:
            close = get_close_matches(name, model.model_fields, n=1)
            meant = f"; did you mean {as_typed([*names[: depth - 1], *close])}?" if close else ""
            known = "" if close else hint(name, tuple(model.model_fields))
            told = _moved(model, name) or meant + known
            raise ConfigError(f"{so_far} is no setting{told}", param=name)
        annotation = model.model_fields[name].annotation
        inner = _inner_model(annotation)
        if inner is None:
            if depth < len(names) and not _takes_keys(annotation):
                text = f"{as_typed(names)}: nothing is below {so_far}, which is one value: set it itself"
                raise ConfigError(text, param=".".join(names[:depth]))
            return
        model = inner


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    found = [each for each in (annotation, *get_args(annotation)) if isinstance(each, type)]
    return next((each for each in found if issubclass(each, BaseModel)), None)


def _takes_keys(annotation: Any) -> bool:
    """Return True if the type is a mapping, which may have any key."""
    each = (annotation, *get_args(annotation))
    return any(one is Any or get_origin(one) in (dict, Mapping) or one is dict for one in each)


ENV_CONFIG_FILE = "KVASIR_CONFIG"
SHARED_SETTINGS = ("bus", "traces", "log_level", "log_format")
"""Settings that all services have."""
_SECTIONS = (*subjects.SERVICES, "stack")
_MAX_YAML_BYTES = 1024 * 1024


class _SharedSettings(BaseSettings):
    bus: BusConfig = BusConfig()
    traces: TracesConfig = TracesConfig()
    log_level: str = ""
    log_format: str = ""


C = TypeVar("C", bound=ServiceConfig)


def load(
    config_type: type[C],
    section: str,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> C:
    """Return the configuration of one service; `argv` defaults to the process's arguments. `--help` lists the
    settings and exits. Raise ConfigError naming the setting, its origin, and what to write instead."""
    return load_with_origins(config_type, section, argv, environ)[0]


def load_with_origins(
    config_type: type[C],
    section: str,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[C, dict[str, str]]:
    """Return the configuration, and by path the origin of each setting that is not a default."""
    environment = os.environ if environ is None else environ
    file_name, flags = _take_config_flag(list(sys.argv[1:] if argv is None else argv), environment)
    layers = [("the file", layer) for layer in _from_yaml(file_name, section)]
    layers += [("the environment", layer) for layer in _from_environment(config_type, section, environment)]
    layers.append(("the flags", _from_flags(config_type, section, flags)))
    merged: dict[str, Any] = {"instance": f"{section}-0"}
    origins: dict[str, str] = {}
    for origin, layer in layers:
        _merge(merged, layer)
        origins |= dict.fromkeys(_paths(layer), origin)
    try:
        return config_type(**merged), origins
    except ValidationError as error:
        first = ".".join(map(str, error.errors()[0]["loc"]))
        raise ConfigError(explain(error, config_type, section, origins), param=first) from None


def _take_config_flag(argv: list[str], environ: Mapping[str, str]) -> tuple[str | None, list[str]]:
    file_name = environ.get(ENV_CONFIG_FILE) or None
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--config":
            file_name = next(words, None)
            if file_name is None:
                raise ConfigError("--config wants the name of a YAML file", param="config")
        elif word.startswith("--config="):
            file_name = word.removeprefix("--config=")
        else:
            rest.append(word)
    return file_name, rest


def _from_yaml(file_name: str | None, section: str) -> list[dict[str, Any]]:
    """Return the file's settings for all services, then those for this one."""
    if file_name is None:
        return []
    try:
        with Path(file_name).open("rb") as file:
            content = yaml.safe_load(file.read(_MAX_YAML_BYTES))
    except OSError as error:
        raise ConfigError(f"{file_name}: {error.strerror}; name a readable file", param="config") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}," if mark else ""
        text = f"{file_name}{where} is not YAML: {getattr(error, 'problem', error)}"
        raise ConfigError(text, param="config") from None
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ConfigError(f"{file_name}: write `section:` with settings below it", param="config")
    known = (*_SECTIONS, *SHARED_SETTINGS, section)
    for name in content:
        if name not in known:
            raise ConfigError(f"{file_name}: no section {name!r}{hint(str(name), known)}", param=str(name))
    own = content.get(section) or {}
    if not isinstance(own, dict):
        raise ConfigError(f"{file_name}: {section} has no settings below it", param=section)
    return [{name: content[name] for name in SHARED_SETTINGS if content.get(name) is not None}, own]


def _from_environment(
    config_type: type[ServiceConfig], section: str, environ: Mapping[str, str]
) -> list[dict[str, Any]]:
    own_prefix = f"{ENV_PREFIX}{section.upper()}__"
    _refuse_unknown_variables(config_type, section, environ)
    layers: list[dict[str, Any]] = []
    for settings_type, prefix in ((_SharedSettings, ENV_PREFIX), (config_type, own_prefix)):
        source = EnvSettingsSource(
            settings_type,
            case_sensitive=False,
            env_prefix=prefix,
            env_nested_delimiter="__",
            env_ignore_empty=True,
        )
        source.env_vars = {name.lower(): value for name, value in environ.items() if value}
        try:
            layers.append(source())
        except SettingsError as error:
            raise ConfigError(f"{prefix}…: {error}; write it as JSON") from None
    return layers


def _refuse_unknown_variables(
    config_type: type[ServiceConfig], section: str, environ: Mapping[str, str]
) -> None:
    """Raise ConfigError for an unknown section or setting, or for a key below a plain value."""
    known = (*_SECTIONS, *SHARED_SETTINGS, section)
    for name in environ:
        first, *names = name.upper().removeprefix(ENV_PREFIX).lower().split("__")
        if not name.upper().startswith(ENV_PREFIX) or not names:
            continue
        if first not in known:
            close = get_close_matches(first, known, n=1)
            meant = f"; did you mean {_as_variable([*close, *names])}?" if close else hint(first, known)
            raise ConfigError(f"{name}: no section {first.upper()}{meant}", param=first)
        if first in SHARED_SETTINGS:
            check_setting(ServiceConfig, [first, *names], _as_variable)
        elif first == section:
            check_setting(config_type, names, lambda path: _as_variable([section, *path]))


def _as_variable(names: Sequence[str]) -> str:
    return ENV_PREFIX + "__".join(names).upper()


def _from_flags(config_type: type[ServiceConfig], section: str, argv: list[str]) -> dict[str, Any]:
    words = [_with_underscores(word) for word in argv]
    for typed, word in zip(argv, words, strict=True):
        if typed.startswith("--") and typed not in ("--", "--help"):
            names = word[2:].partition("=")[0].split(".")
            check_setting(config_type, names, partial(_as_flag, typed))
    try:
        source: CliSettingsSource[Any] = CliSettingsSource(
            config_type,
            cli_prog_name=f"python -m services.{section} [--config FILE] [--SETTING VALUE] …",
            formatter_class=_BriefHelp,
            cli_parse_args=words,
            cli_exit_on_error=False,
            cli_enforce_required=False,
            cli_use_class_docs_for_groups=True,
        )
        return source()
    except SettingsError as error:
        raise ConfigError(f"{error}; --help lists the settings", param="argv") from None


class _BriefHelp(argparse.RawDescriptionHelpFormatter):
    """Help formatter with a one-line usage."""

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None = None,
    ) -> None:
        super().add_usage(usage, [], [], prefix)


def _as_flag(typed: str, names: Sequence[str]) -> str:
    """Format a flag, with hyphens if the typed one has some."""
    flag = "--" + ".".join(names)
    return flag.replace("_", "-") if "-" in typed[2:].partition("=")[0] else flag


def _with_underscores(word: str) -> str:
    """Turn `--log-level` into `--log_level`."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def _merge(into: dict[str, Any], layer: Mapping[str, Any]) -> None:
    for name, value in layer.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = dict(value) if isinstance(value, dict) else value


def _paths(layer: Mapping[str, Any], prefix: str = "") -> list[str]:
    paths: list[str] = []
    for name, value in layer.items():
        paths.append(f"{prefix}{name}")
        if isinstance(value, dict):
            paths += _paths(value, f"{prefix}{name}.")
    return paths
