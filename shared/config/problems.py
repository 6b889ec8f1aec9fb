"""Saying what is wrong with a configuration, so that it can be put right."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from pydantic import BaseModel, ValidationError

from shared.config.models import ENV_PREFIX


def first_path(error: ValidationError) -> str:
    """The first setting that is wrong, such as `bus.url`."""
    return ".".join(str(part) for part in error.errors()[0]["loc"])


def explain(
    error: ValidationError, config_type: type[BaseModel], section: str, origins: Mapping[str, str]
) -> str:
    """All that is wrong: the setting, what it was given and where, and how to set it. Shows no secret."""
    problems: list[str] = []
    for detail in error.errors(include_url=False):
        names = [str(part) for part in detail["loc"]]
        path = ".".join(names)
        where = f" in {origins[path]}" if path in origins else ""
        if detail["type"] == "extra_forbidden":
            known = _settings_of(config_type, names[:-1])
            problems.append(f"{path}: no such setting{where}{hint(names[-1], known)}")
            continue
        variable = f"{ENV_PREFIX}{section}__{path.replace('.', '__')}".upper()
        problems.append(
            f"{path or section}: {detail['msg']}{_shown(path, detail['input'])}{where}"
            f" (set {section}.{path} in the file or with `up --set`, {variable}, or --{path})"
        )
    return "; ".join(problems)


def _shown(path: str, value: object) -> str:
    """What was given, unless it is a secret or no scalar."""
    is_secret = any(word in path for word in ("password", "secret", "key", "token"))
    if is_secret or not isinstance(value, str | int | float) or len(str(value)) > 80:
        return ""
    return f"; got {value!r}"


def _settings_of(model: type[BaseModel], path: Sequence[str]) -> tuple[str, ...]:
    for name in path:
        field = model.model_fields.get(name)
        inner = field.annotation if field else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return ()
        model = inner
    return tuple(model.model_fields)


def hint(name: str, known: Sequence[str]) -> str:
    """The name that was probably meant, else all there are."""
    close = get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are: {', '.join(sorted(known))}" if known else ""
