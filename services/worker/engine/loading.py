"""Loads any Hugging Face decoder, from a folder, a GGUF file or the hub.

Running one token through the model finds each layer's KV shape, so no architecture is a special case."""

import contextlib
import json
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM
from transformers.utils import logging as _logging

from services.worker.engine.attention import LayerProbe, LayerShape
from services.worker.engine.checkpoint import canonical, checkpoint_digest, local_folder
from services.worker.engine.gguf_weights import GgufWeights, empty_module, fill
from services.worker.engine.native.families import experts_of, obstacle
from services.worker.engine.native.library import AttentionMode, choose
from services.worker.engine.native.weights import AS_STORED, Precision
from services.worker.engine.packed_weights import PackedWeights
from services.worker.engine.paged import stored_dim
from services.worker.engine.progress import LoadProgress
from shared.errors import ConfigError
from shared.gguf_files import WEIGHTS
from shared.log import get_logger
from shared.model_files import HubId, check_model, read_json, source_of
from shared.tokenizer_files import model_folder


def model_digest(module: Any) -> str:
    """Return the hex digest of a model's class, settings that affect KV, parameters and buffers (CRC-32)."""
    configuration = json.dumps(canonical(module.config.to_dict()), sort_keys=True, default=str)
    digest = blake2b(f"{type(module).__name__}\n{configuration}\n".encode(), digest_size=16)
    for name, tensor in sorted(module.state_dict().items()):
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {zlib.crc32(data)}\n".encode())
    return digest.hexdigest()


def layout_name(layers: Sequence[LayerShape]) -> str:
    """Return the memory layout of a block, for the fingerprint."""
    shapes = ",".join(f"{layer.kv_heads}x{layer.head_dim}+{layer.value_dim}" for layer in layers)
    return f"K[head,dim,token]V[head,token,dim]:{shapes}"


_log = get_logger("worker.loading")
_quiet: Any = _logging

_UNKNOWN_ARCHITECTURE = ("does not recognize this architecture", "Unrecognized configuration class")
"""Phrases of transformers' errors for unknown architectures."""
_ASK_S = 10.0
_SMALL = (".json", ".jinja", ".txt", ".model")
_TOKEN = "set HF_TOKEN to a token of an account that may read it (docs/models.md)"
BITS = {"bf16": 16, "int8": 8, "int4": 4}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KV_DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode and its properties."""

    module: Any
    layers: tuple[LayerShape, ...]
    vocabulary: int
    """Number of token ids."""
    max_positions: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    precision: Precision = AS_STORED
    digest: str = ""
    """Name of the weights where the module has not them all; empty: `model_digest`."""

    def block_bytes(self, block_tokens: int) -> int:
        """Return the bytes of one KV block over all layers."""
        dims = [(each.kv_heads, dim) for each in self.layers for dim in (each.head_dim, each.value_dim)]
        per_token = sum(heads * stored_dim(dim, self.kv_dtype) for heads, dim in dims)
        return per_token * block_tokens * self.kv_dtype.itemsize


def native_obstacle(module: Any, library: Any) -> str:
    """Return why the native step does not compute a module; empty if it does."""
    first = next(module.parameters())
    if first.dtype is not torch.float32 or first.device.type != "cpu":
        return "the native step computes on CPUs, in float32"
    return obstacle(module) or (
        "" if library is not None else "there is no native library, or attention is torch"
    )


def load(
    model: str,
    *,
    dtype: str,
    device: str,
    weights: str = "auto",
    attention: AttentionMode = "auto",
    progress: LoadProgress | None = None,
) -> LoadedModel:
    """Return the model of a folder, GGUF file or hub id. Raises ConfigError if it cannot be loaded or served.

    `weights`: `worker.weights`."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}", param="dtype")
    _quiet.disable_progress_bar()
    _quiet.set_tqdm_hook(partial(_counted, progress or LoadProgress()))
    check_model(model)
    source = source_of(model)
    options = {"revision": source.revision} if isinstance(source, HubId) and source.revision else {}
    name = source.name if isinstance(source, HubId) else str(source)
    if device != "cpu" and not torch.cuda.is_available():
        text = f"device {device}: torch finds no GPU here: write worker.device=cpu, or look at `nvidia-smi`"
        raise ConfigError(text, param="device")
    how = dtype, device, weights, attention, progress or LoadProgress()
    if isinstance(source, Path) and (source / WEIGHTS).exists():
        return _of_file(model, lambda folder, config: GgufWeights(folder / WEIGHTS, config), *how)
    config = read_json(model_folder(model) / "config.json")
    if (packing := config.get("quantization_config")) and device == "cpu":
        return _of_file(model, lambda folder, _: PackedWeights(folder, packing), *how)
    try:
        module = AutoModelForCausalLM.from_pretrained(
            name, dtype=DTYPES[dtype], attn_implementation="eager", **options
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        if any(words in str(error) for words in _UNKNOWN_ARCHITECTURE):
            raise ConfigError(_unsupported(model), param="model") from None
        kind = "folder" if isinstance(source, Path) else "hub id"
        text = f"{kind} {model!r} holds no model that can be loaded: {error}"
        raise ConfigError(text, param="model") from error
    torch_module: Any = module
    loaded = describe(torch_module.to(device))
    if weights not in BITS:
        return loaded
    _check_native(loaded.module, device, attention, weights)
    digest = f"{model_digest(loaded.module)} {weights}"
    return replace(loaded, precision=Precision(BITS[weights]), digest=digest)


def _of_file(
    model: str,
    opened: Callable[[Path, Any], GgufWeights | PackedWeights],
    dtype: str,
    device: str,
    weights: str,
    attention: AttentionMode,
    progress: LoadProgress,
) -> LoadedModel:
    """Return the model of a file of quantised weights, in its bits if the native step computes it."""
    folder = local_folder(model)
    module = empty_module(folder, DTYPES[dtype]).to(device)
    file = opened(folder, module.config)
    if isinstance(file, PackedWeights) and experts_of(module.config):
        text = "experts with packed weights are not read: serve the unquantised checkpoint, with weights int4"
        raise ConfigError(text, param="model")
    if weights in BITS:
        _check_native(module, device, attention, weights)
    library = choose(attention, device=torch.device(device), dtype=DTYPES[dtype])
    why = "" if weights == "fp32" else native_obstacle(module, library)
    is_kept = weights != "fp32" and not why
    if why and (kinds := file.quantised()):
        _log.warning("weights of %s are widened to %s: %s", ", ".join(kinds), dtype, why)
    fill(module, file, progress, vectors_only=is_kept)
    if not is_kept:
        return describe(module)
    digest = f"{checkpoint_digest(model, dtype)} {weights}"
    return replace(describe(module), precision=Precision(BITS.get(weights), file), digest=digest)


def _check_native(module: Any, device: str, attention: AttentionMode, weights: str) -> None:
    library = choose(attention, device=torch.device(device), dtype=next(module.parameters()).dtype)
    if why := native_obstacle(module, library):
        text = f"weights {weights} are computed by the native step, which cannot compute this model: {why}; "
        raise ConfigError(f"{text}set weights auto", param="weights")


def _counted(progress: LoadProgress, make: Any, words: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Replace the loader's progress bar over tensors, to report its progress."""
    if not words or not isinstance(words[0], Collection):
        return make(*words, **options)

    def told(tensors: Collection[Any]) -> Iterator[Any]:
        for done, tensor in enumerate(tensors):
            progress.at(f"reads the weights: {100 * done // len(tensors)} %")
            yield tensor

    return told(words[0])


def _unsupported(model: str) -> str:
    """Return the error message for a model whose architecture is not supported."""
    config = read_json(model_folder(model) / "config.json")
    name = ", ".join(config.get("architectures") or [str(config.get("model_type", "unknown"))])
    text = f"model {model!r} has the architecture {name}, which Kvasir cannot serve: it serves decoders that "
    return f"{text}transformers {transformers.__version__} has as causal language models (docs/models.md)"


def describe(module: Any) -> LoadedModel:
    """Probe a transformers causal language model. Raises ConfigError if its attention cannot be replaced."""
    module.eval().requires_grad_(False)
    config = module.config.get_text_config()
    probe = LayerProbe()
    replace_attention(module, probe.name)
    parameter = next(module.parameters())
    token = torch.zeros(1, 1, dtype=torch.int64, device=parameter.device)
    with torch.inference_mode():
        module(input_ids=token, position_ids=token, use_cache=False)
    layers = tuple(probe.layers[index] for index in sorted(probe.layers))
    if sorted(probe.layers) != list(range(config.num_hidden_layers)):
        text = f"{type(module).__name__} calls attention in layers {sorted(probe.layers)} of "
        text += f"{config.num_hidden_layers}; only decoders with attention in every layer are served"
        raise ConfigError(text, param="model")
    vocabulary, dtype = module.get_input_embeddings().num_embeddings, parameter.dtype
    return LoadedModel(module, layers, vocabulary, _max_positions(config), dtype, dtype, parameter.device)


def _max_positions(config: Any) -> int:
    """Return the longest sequence that the engine computes as the model defines it."""
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int):
        raise ConfigError("the model's configuration gives no max_position_embeddings", param="model")
    limits = [positions, getattr(config, "attention_chunk_size", None)]
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # Beyond the original limit the scaling of all positions depends on the longest sequence.
        limits += [rope.get("original_max_position_embeddings")]
        limits += [getattr(config, "original_max_position_embeddings", None)]
    return min(limit for limit in limits if isinstance(limit, int))


def replace_attention(module: Any, name: str) -> None:
    """Let every layer call the attention function registered under `name`. Raises ConfigError."""
    module.set_attn_implementation(name)
    if module.config.get_text_config()._attn_implementation != name:
        text = f"{type(module).__name__} does not use transformers' attention interface"
        raise ConfigError(text, param="model")


def fetch(model: str, progress: LoadProgress) -> None:
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
