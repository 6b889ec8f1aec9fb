"""Load any Hugging Face decoder, from a folder or the hub, for packed and paged computation.

No architecture is treated specially: what a layer keeps per token is found by running one token through the
model.
"""

import json
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
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
from services.worker.engine.checkpoint import canonical
from services.worker.engine.progress import Progress
from shared.errors import ConfigError
from shared.model_files import HubId, check_model, read_json, source_of
from shared.tokenizer_files import model_folder


def configuration(module: Any) -> str:
    """What a transformers model computes by, defaults filled in, as JSON in one form: base and scaling of
    rotary positions, epsilons, windows, scales of scores and the rest."""
    return json.dumps(canonical(module.config.to_dict()), sort_keys=True, default=str)


def model_digest(module: Any) -> str:
    """Of class, `configuration`, and every parameter and buffer by name, shape and bytes (CRC-32: 4 GB/s). In
    hex."""
    digest = blake2b(f"{type(module).__name__}\n{configuration(module)}\n".encode(), digest_size=16)
    for name, tensor in sorted(module.state_dict().items()):
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {zlib.crc32(data)}\n".encode())
    return digest.hexdigest()


def layout_name(layers: Sequence[LayerShape]) -> str:
    """How a block's bytes lie, for the fingerprint."""
    shapes = ",".join(f"{layer.kv_heads}x{layer.head_dim}+{layer.value_dim}" for layer in layers)
    return f"K[head,dim,token]V[head,token,dim]:{shapes}"


_quiet: Any = _logging

_UNKNOWN_ARCHITECTURE = ("does not recognize this architecture", "Unrecognized configuration class")
"""In transformers' messages, which go on with the advice to install another transformers."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode and what the engine must know of it."""

    module: Any
    layers: tuple[LayerShape, ...]
    vocabulary: int
    """Token ids are below this."""
    max_positions: int
    dtype: torch.dtype
    device: torch.device

    def block_bytes(self, block_tokens: int) -> int:
        """What one KV block takes over all layers."""
        per_token = sum(layer.kv_heads * (layer.head_dim + layer.value_dim) for layer in self.layers)
        return per_token * block_tokens * self.dtype.itemsize


def load(model: str, *, dtype: str, device: str, progress: Progress | None = None) -> LoadedModel:
    """The model in folder `model`, or of that hub id.

    Raises ConfigError when it cannot be loaded or computed here.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}", param="dtype")
    _quiet.disable_progress_bar()
    _quiet.set_tqdm_hook(partial(_counted, progress or Progress()))
    check_model(model)
    source = source_of(model)
    options = {"revision": source.revision} if isinstance(source, HubId) and source.revision else {}
    name = source.name if isinstance(source, HubId) else str(source)
    if device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(
            f"device {device}: torch finds no GPU here: write worker.device=cpu, or look at `nvidia-smi`",
            param="device",
        )
    try:
        module = AutoModelForCausalLM.from_pretrained(
            name, dtype=DTYPES[dtype], attn_implementation="eager", **options
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        if any(words in str(error) for words in _UNKNOWN_ARCHITECTURE):
            raise ConfigError(_unsupported(model), param="model") from None
        kind = "folder" if isinstance(source, Path) else "hub id"
        raise ConfigError(
            f"{kind} {model!r} holds no model that can be loaded: {error}", param="model"
        ) from error
    torch_module: Any = module
    return describe(torch_module.to(device))


def _counted(progress: Progress, make: Any, words: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """In the place of the loader's bar over tensors, which tells how many it has read."""
    if not words or not isinstance(words[0], Collection):
        return make(*words, **options)
    return _told(progress, words[0])


def _told(progress: Progress, tensors: Collection[Any]) -> Iterator[Any]:
    for done, tensor in enumerate(tensors):
        progress.at(f"reads the weights: {100 * done // len(tensors)} %")
        yield tensor


def _unsupported(model: str) -> str:
    """Which architecture a model has, and that it cannot be served."""
    config = read_json(model_folder(model) / "config.json")
    name = ", ".join(config.get("architectures") or [str(config.get("model_type", "unknown"))])
    return (
        f"model {model!r} has the architecture {name}, which Kvasir cannot serve: it serves decoders that "
        f"transformers {transformers.__version__} has as causal language models (docs/models.md)"
    )


def describe(module: Any) -> LoadedModel:
    """Probe a transformers causal language model.

    Raises ConfigError when its attention cannot be replaced by ours.
    """
    module.eval().requires_grad_(False)
    config = module.config.get_text_config()
    probe = LayerProbe()
    replace_attention(module, probe.name)
    parameter = next(module.parameters())
    token = torch.zeros(1, 1, dtype=torch.int64, device=parameter.device)
    with torch.inference_mode():
        module(input_ids=token, position_ids=token, use_cache=False)
    if sorted(probe.layers) != list(range(config.num_hidden_layers)):
        raise ConfigError(
            f"{type(module).__name__} calls attention in layers {sorted(probe.layers)} of "
            f"{config.num_hidden_layers}; only decoders with attention in every layer are served",
            param="model",
        )
    return LoadedModel(
        module=module,
        layers=tuple(probe.layers[index] for index in sorted(probe.layers)),
        vocabulary=module.get_input_embeddings().num_embeddings,
        max_positions=_max_positions(config),
        dtype=parameter.dtype,
        device=parameter.device,
    )


def _max_positions(config: Any) -> int:
    """The longest sequence for which attention and positions are what this engine computes."""
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int):
        raise ConfigError("the model's configuration gives no max_position_embeddings", param="model")
    limits = [positions, getattr(config, "attention_chunk_size", None)]
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # Beyond it all positions are scaled otherwise, by the longest sequence in the batch.
        limits += [rope.get("original_max_position_embeddings")]
        limits += [getattr(config, "original_max_position_embeddings", None)]
    return min(limit for limit in limits if isinstance(limit, int))


def replace_attention(module: Any, name: str) -> None:
    """Let every layer call the attention function registered under `name`."""
    module.set_attn_implementation(name)
    if module.config.get_text_config()._attn_implementation != name:
        raise ConfigError(
            f"{type(module).__name__} does not use transformers' attention interface", param="model"
        )
