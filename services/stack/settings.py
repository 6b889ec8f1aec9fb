"""`config`: the settings of every service as `up` would give them, and where each value comes from."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, SecretStr

from services.stack.obstructions import config_type_of
from services.stack.table import Sources
from shared import subjects
from shared.command_line import hint
from shared.config import SHARED_SETTINGS, ServiceConfig, load_with_origins
from shared.errors import ConfigError

SECTIONS = ("stack", *subjects.SERVICES)
_SET_BY_UP = ("instance", "bus.url", "bus.user", "bus.password")
_HEAD = (
    "# Settings",
    "",
    "`kvasir config --markdown` writes this page. In a YAML file (`kvasir up --config FILE`) a section's",
    "settings stand below its name. `--set SECTION.SETTING=VALUE` sets one for a service, and",
    "`--set worker-1.SETTING=VALUE` for one instance; so does the variable `KVASIR_SECTION__SETTING`.",
)
_ORIGINS = {"the file": "file", "the environment": "environment", "the flags": "flag"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting in force; `origin` is default, file, environment, flag or --set."""

    section: str
    path: str
    value: str
    origin: str
    description: str


def in_force(sources: Sources, stack: BaseModel, stack_origins: Mapping[str, str]) -> Iterator[Setting]:
    """Yield all settings, by section. Raise ConfigError for an invalid one."""
    yield from _settings("stack", stack, stack_origins)
    file = ["--config", str(sources.config_file)] if sources.config_file else []
    for service in subjects.SERVICES:
        config_type = config_type_of(service)
        overrides = sources.environment(service, service)
        config, origins = load_with_origins(config_type, service, file, {**sources.environ, **overrides})
        told = {name.upper().removeprefix(f"KVASIR_{service.upper()}__").lower() for name in overrides}
        origins |= {path: "--set" for path in origins if path.replace(".", "__") in told}
        yield from _settings(service, config, origins)


def listed(settings: Sequence[Setting], sections: Sequence[str], *, with_defaults: bool) -> list[Setting]:
    """Return those of `sections` (all if empty), without defaults unless asked. Raise ConfigError."""
    for section in sections:
        if section not in SECTIONS:
            raise ConfigError(f"no section {section!r}{hint(section, SECTIONS)}", param="section")
    return [
        each
        for each in settings
        if (not sections or each.section in sections) and (with_defaults or each.origin != "default")
    ]


def as_text(settings: Sequence[Setting]) -> Iterator[str]:
    """Yield one line for each setting, aligned."""
    names = [f"{each.section}.{each.path}" for each in settings]
    wide = max(map(len, names), default=0)
    for name, each in zip(names, settings, strict=True):
        yield f"{name:{wide}}  {each.value}  ({each.origin})"


def as_table() -> Iterator[str]:
    """Yield docs/settings.md: every setting with type, default and meaning."""
    yield from _HEAD
    shared_by_all = list(_described(ServiceConfig))
    for section, settings in (("all services", shared_by_all), *((each, None) for each in SECTIONS)):
        rows = settings or [
            row for row in _described(config_type_of(section)) if row[0].split(".")[0] not in SHARED_SETTINGS
        ]
        yield from ("", f"## {section}", "", "| setting | default | what it does |", "|---|---|---|")
        for path, default, description in rows:
            yield f"| `{path}` | {f'`{default}`' if default else ''} | {description.replace('|', '/')} |"


def _described(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True, validated_data={})
        if isinstance(default, BaseModel):
            yield from _described(type(default), f"{prefix}{name}.")
        elif f"{prefix}{name}" not in _SET_BY_UP:
            yield f"{prefix}{name}", "" if default is None else _shown(default), field.description or ""


def _settings(
    section: str, config: BaseModel, origins: Mapping[str, str], prefix: str = ""
) -> Iterator[Setting]:
    for name, field in type(config).model_fields.items():
        path, value = f"{prefix}{name}", getattr(config, name)
        if isinstance(value, BaseModel):
            yield from _settings(section, value, origins, f"{path}.")
        elif path not in _SET_BY_UP:
            origin = origins.get(path, "default")
            yield Setting(section, path, _shown(value), _ORIGINS.get(origin, origin), field.description or "")


def _shown(value: Any) -> str:
    if isinstance(value, SecretStr):
        return "(secret)" if value.get_secret_value() else '""'
    if isinstance(value, tuple):
        value = list(value)
    return json.dumps(value, default=str, ensure_ascii=False)
