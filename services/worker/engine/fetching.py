"""Downloads a model from the Hugging Face hub and shows its progress."""

import contextlib
from pathlib import Path

from services.worker.engine.progress import Progress
from shared.errors import ConfigError
from shared.model_files import HubId, source_of

_ASK_S = 10.0
_SMALL = (".json", ".jinja", ".txt", ".model")
_TOKEN = "set HF_TOKEN to a token of an account that may read it (docs/models.md)"


def fetch(model: str, progress: Progress) -> None:
    """Download the files of a hub id to the hub's cache; do nothing for a folder.

    If the hub is not reachable, the cache may have all files. Raises ConfigError for a model without access.
    """
    source = source_of(model)
    if not isinstance(source, HubId):
        return
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    progress.at(f"asks the hub for {source}")
    try:
        info = HfApi().model_info(source.name, revision=source.revision, timeout=_ASK_S, files_metadata=True)
    except GatedRepoError:
        page = f"https://huggingface.co/{source.name}"
        text = f"model {source.name} is gated: accept its terms at {page}, then {_TOKEN}"
        raise ConfigError(text, param="model") from None
    except RepositoryNotFoundError:
        text = f"the hub has no model {source.name}, or it is private: check the name, or {_TOKEN}"
        raise ConfigError(text, param="model") from None
    except Exception:  # not reachable; the hub client's errors have no common base
        return
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    top = {name: size for name, size in sizes.items() if "/" not in name}
    weights = [name for name in top if name.endswith(".safetensors")]
    weights = weights or [name for name in top if name.startswith("pytorch_model") and name.endswith(".bin")]
    wanted = {name: size for name, size in top.items() if name in weights or name.endswith(_SMALL)}
    folder = Path(HF_HUB_CACHE) / f"models--{source.name.replace('/', '--')}"
    names, whole_bytes = list(wanted), sum(wanted.values())
    with progress.downloading(str(source), folder, whole_bytes), contextlib.suppress(OSError):
        snapshot_download(source.name, revision=source.revision, allow_patterns=names)  # the loader raises
