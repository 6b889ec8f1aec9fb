"""Weights of a GPTQ, AWQ or compressed-tensors folder under transformers' names, as numbers of a few bits."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from services.worker.engine.native.grouped import (
    EIGHT_FLOATS,
    EIGHT_HALVES,
    FOUR_FLOATS,
    FOUR_HALVES,
    GROUP,
    Grouped,
)
from shared.errors import ConfigError

_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Place in a word of each of 8 columns."""
_OTHERWISE = "serve a checkpoint in GPTQ, AWQ, compressed-tensors (integers) or GGUF, or the unquantised one"


class PackedWeights:
    """The tensors of a folder's safetensors files. The files stay mapped.

    Raise ConfigError for weights that are not read."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.file = folder
        self._method = str(settings.get("quant_method"))
        if what := _unread(self._method, settings):
            raise ConfigError(
                f"{folder} has weights in {what}, which is not read: {_OTHERWISE}", param="model"
            )
        self._zero_shift = int(settings.get("checkpoint_format") != "gptq_v2")
        self._files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            opened: Any = safe_open(str(path), "pt")
            self._files |= dict.fromkeys(opened.keys(), opened)

    @property
    def is_tied(self) -> bool:
        """Whether the table of embeddings is the head's, too."""
        return not any(found.startswith("lm_head.") for found in self._files)

    def quantised(self) -> list[str]:
        """Return the name of the format."""
        return [self._method]

    def matrix(self, name: str) -> Grouped | torch.Tensor:
        """Return a matrix in its own bits, or in fp32 if it is stored so or no kernel has its groups."""
        stem = name.removesuffix(".weight")
        if name == "lm_head.weight" and self.is_tied:
            stem = "model.embed_tokens"
        names = {part: f"{stem}.{part}" for part in _PARTS if f"{stem}.{part}" in self._files}
        parts = {part: self._files[full].get_tensor(full) for part, full in names.items()}
        plain: torch.Tensor | None = parts.get("weight")
        if plain is not None and len(parts) == 1 and plain.is_floating_point():
            return plain.float()
        if not parts and name in self._files:  # a bias
            values: torch.Tensor = self._files[name].get_tensor(name)
            return values.float()
        try:
            return _grouped(*_READERS[self._method](parts, self._zero_shift))
        except KeyError as missing:
            text = f"{self.file} has no readable tensor {stem}.{missing.args[0]}: download it again, or "
            raise ConfigError(text + _OTHERWISE, param="model") from None

    def values(self, name: str) -> torch.Tensor:
        """Return a tensor in fp32."""
        found = self.matrix(name)
        return found if isinstance(found, torch.Tensor) else found.values()


def _unread(method: str, settings: Mapping[str, Any]) -> str:
    """Return the format if it is not read, else an empty string."""
    if method not in _READERS:
        return method
    form = str(settings.get("format"))
    if method == "compressed-tensors" and form not in ("pack-quantized", "int-quantized"):
        return f"{method}, format {form}"
    version = str(settings.get("version", "gemm")).lower()
    if method == "awq" and version != "gemm":
        return f"awq, version {version}"
    bits = settings.get("bits", 4)
    return "" if bits in (2, 4, 8) else f"{method} of {bits} bits"


_Parts = Mapping[str, torch.Tensor]
_Read = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor | None]
"""Numbers from 0 `[outputs, inputs]`, scales and zeros `[outputs, groups]`, bits, each input's group."""


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the numbers in the last dimension's int32 words, the lowest first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).short().flatten(-2)


def _gptq(parts: _Parts, zero_shift: int) -> _Read:
    scales = parts["scales"].T
    bits = parts["qzeros"].shape[1] * 32 // len(scales)
    zeros = _unpacked(parts["qzeros"], bits).T + zero_shift
    return _unpacked(parts["qweight"].T, bits), scales, zeros, bits, parts.get("g_idx")


def _awq(parts: _Parts, _: int) -> _Read:
    numbers, zeros = (
        _unpacked(parts[name], 4).reshape(len(parts[name]), -1, 8)[..., _AWQ_ORDER].flatten(-2).T
        for name in ("qweight", "qzeros")
    )
    return numbers, parts["scales"].T, zeros, 4, None


def _compressed(parts: _Parts, _: int) -> _Read:
    if "weight_packed" in parts:
        inputs = int(parts["weight_shape"][1])
        bits = parts["weight_packed"].shape[1] * 32 // inputs
        numbers = _unpacked(parts["weight_packed"], bits)[:, :inputs]
    elif parts["weight"].dtype is torch.int8:
        bits, numbers = 8, parts["weight"].short() + 128
    else:
        raise KeyError("weight in int8")
    middle, scales = 1 << (bits - 1), parts["weight_scale"]
    scales = scales.expand(len(numbers), 1) if scales.numel() == 1 else scales
    zeros = torch.full(scales.shape, middle)
    if (stored := parts.get("weight_zero_point")) is not None:
        is_packed = stored.dtype is torch.int32
        zeros = _unpacked(stored.T, bits).T[: len(numbers)] if is_packed else stored.short() + middle
    order = parts.get("weight_g_idx")
    return numbers, scales, zeros.expand(scales.shape), bits, None if order is None or order[0] < 0 else order


def _grouped(
    numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int, order: torch.Tensor | None
) -> Grouped | torch.Tensor:
    """Return weights `scale * (number - zero)`; in fp32 if their groups are no runs of `GROUP` inputs."""
    inputs, scales, zeros = numbers.shape[1], scales.float(), zeros.float()
    size = -(-inputs // scales.shape[1])
    runs = torch.arange(inputs) // size
    order = runs if order is None else order.long()
    if size % GROUP or inputs % size or not torch.equal(order, runs):
        return scales[:, order] * (numbers - zeros[:, order])
    scales, zeros = (part.repeat_interleave(size // GROUP, 1).contiguous() for part in (scales, zeros))
    is_half = torch.equal(scales.half().float(), scales)
    if bits > 4:
        least, kept = (128 - zeros) * scales, (numbers - 128).to(torch.int8).contiguous().view(torch.uint8)
        is_small = is_half and not least.any()
        return Grouped(EIGHT_HALVES, kept, scales) if is_small else Grouped(EIGHT_FLOATS, kept, scales, least)
    least = -zeros * scales
    kind = FOUR_HALVES if is_half and torch.equal(least.half().float(), least) else FOUR_FLOATS
    return Grouped(kind, numbers.to(torch.uint8).contiguous(), scales, least)


_PARTS = (
    "qweight qzeros scales g_idx weight weight_packed weight_shape weight_scale weight_zero_point "
    "weight_g_idx"
).split()
_READERS: dict[str, Callable[[_Parts, int], _Read]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
}
"""By `quant_method` of the configuration."""
