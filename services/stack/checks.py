"""Whether the services could start with their settings: asked of all before the first process is started.

A service's settings are in `services.NAME.config`, which is imported by name, and nothing else of it.
"""

import contextlib
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from services.stack.children import ChildSpec
from shared import subjects
from shared.config import ServiceConfig, load
from shared.errors import ConfigError

_PREFIX = "services."


def check_settings(specs: Iterable[ChildSpec], root: Path) -> None:
    """Of all children that are services. Raises ConfigError with everything that is wrong, a line each.

    `root` is the folder in which they will run."""
    problems: dict[str, list[str]] = {}
    with contextlib.chdir(root):
        for spec in specs:
            service = _service_of(spec)
            if service is None:
                continue
            settings = import_module(f"{_PREFIX}{service}.config")
            config_type: type[ServiceConfig] = getattr(settings, f"{service.capitalize()}Config")
            try:
                load(config_type, service, ["--instance", spec.name], spec.env).check()
            except ConfigError as error:
                problems.setdefault(error.message, []).append(spec.name)
    if problems:
        raise ConfigError("\nerror: ".join(f"{_whose(them)}{text}" for text, them in problems.items()))


def _service_of(spec: ChildSpec) -> str | None:
    """Children that are no services have no settings of their own."""
    name = next((word.removeprefix(_PREFIX) for word in spec.argv if word.startswith(_PREFIX)), "")
    return name if name in subjects.SERVICES else None


def _whose(instances: list[str]) -> str:
    """What gateway and workers share (the model) is nobody's own."""
    services = {instance.rpartition("-")[0] for instance in instances}
    if len(services) > 1:
        return ""
    return f"{instances[0] if len(instances) == 1 else services.pop()}: "
