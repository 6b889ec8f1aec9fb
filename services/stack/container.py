"""`python -m services.stack.container INSTANCE|worker [FLAG …]`: start a service in a container of
docker-compose.yml, with the model of `KVASIR_MODEL`.

`worker` takes a free name and its NATS password from the pool, so that all workers are one scalable service.
A lock on the name's file lasts as long as the process, however it ends.
"""

import fcntl
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from services.stack import models
from shared import subjects
from shared.config import ENV_PREFIX
from shared.errors import ConfigError

POOL = Path("/run/kvasir/workers")
TAKEN = Path("/tmp/kvasir-worker.env")
"""Link to the file of the container's own name, for its health check."""
_OF_MODELS = ("gateway", "worker")
"""Services that read the model."""


def main(argv: Sequence[str] | None = None) -> int:
    """Become the service. Return exit code 2 if there is no name or no model for it."""
    instance, *flags = sys.argv[1:] if argv is None else argv
    environ = dict(os.environ)
    try:
        if instance == "worker":
            environ = {**take_name(POOL, TAKEN), **environ}
            environ.setdefault(f"{ENV_PREFIX}WORKER__BULK__ADVERTISE", socket.gethostname())
            instance = environ[f"{ENV_PREFIX}BUS__USER"]
        service = subjects.service_of(instance)
        if (model := environ.get(f"{ENV_PREFIX}MODEL")) and service in _OF_MODELS:
            flags = [*model_flags(model), *flags]
    except (ValueError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    words = [sys.executable, "-m", f"services.{service}", "--instance", instance, *flags]
    os.execve(sys.executable, words, environ)


def take_name(pool: Path, taken: Path) -> dict[str, str]:
    """Lock the first free file of `pool` until this process ends, also beyond `exec`, and link to it from
    `taken`. Return the file's variables. Raise ConfigError if no name is free."""
    files = sorted(pool.glob("worker-*.env"), key=lambda path: (len(path.name), path.name))
    for file in files:
        opened = os.open(file, os.O_RDONLY)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(opened)
            continue
        os.set_inheritable(opened, True)
        taken.unlink(missing_ok=True)
        taken.symlink_to(file)
        return variables(file)
    raise ConfigError(
        f"all {len(files)} names for workers in {pool} are taken: add one by "
        f"`python -m services.stack.compose deploy/secrets worker-{len(files)}`"
    )


def variables(file: Path) -> dict[str, str]:
    """Return the variables of an environment file."""
    return dict(line.split("=", 1) for line in file.read_text().splitlines())


def with_own_name(environ: Mapping[str, str], taken: Path = TAKEN) -> dict[str, str]:
    """Return the environment with the variables of the name that this container took. Raise ConfigError
    before it has one."""
    try:
        return {**variables(taken), **environ}
    except OSError:
        raise ConfigError("this container has no name yet: see its log") from None


def model_flags(model: str) -> list[str]:
    """Return a service's flags for a folder, GGUF file, hub id, or a model that `kvasir models` knows. The
    default one is fetched if necessary. Raise ConfigError."""
    if models.resolved(model) == model and model in models.TO_PULL:
        if model == models.DEFAULT:
            models.pull(model, None, models.from_hub)
        else:  # the worker downloads it
            model = f"{model}={models.TO_PULL[model][0]}"
    name, where = models.named(model)
    return ["--model", where, "--served-name", name]


if __name__ == "__main__":
    raise SystemExit(main())
