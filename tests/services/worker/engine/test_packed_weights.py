"""GPTQ, AWQ and compressed-tensors folders are computed as the values that their numbers stand for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from services.worker.engine.forward import TransformersForward, make_forward
from services.worker.engine.loading import load
from services.worker.engine.native import grouped
from services.worker.engine.packed_weights import PackedWeights
from shared.errors import ConfigError
from tests.services.worker.engine.native.test_families import expected, logits, make_module, paged

Tensors = dict[str, torch.Tensor]
Packed = tuple[Tensors, torch.Tensor]
"""Tensors of a matrix by suffix, and its values."""
_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack the last dimension into int32, the lowest first."""
    count = 32 // bits
    total = sum(numbers[..., at::count].long() << (bits * at) for at in range(count))
    assert isinstance(total, torch.Tensor)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int().contiguous()


def drawn(shape: torch.Size, bits: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    outputs, inputs = shape
    numbers = torch.randint(0, 1 << bits, (outputs, inputs))
    zeros = torch.randint(1, 1 << bits, (outputs, inputs // size))
    return numbers, (torch.rand(zeros.shape) * 0.6 / (1 << bits) + 1e-3).half(), zeros


def valued(
    numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, order: torch.Tensor
) -> torch.Tensor:
    return scales.float()[:, order] * (numbers - zeros[:, order])


def gptq(shape: torch.Size, bits: int = 4, size: int = 32, *, shift: int = 1, mixed: bool = False) -> Packed:
    numbers, scales, zeros = drawn(shape, bits, size)
    order = torch.arange(shape[1]) // size
    if mixed:
        order = order[torch.randperm(shape[1])]
    parts = {"qweight": words(numbers, bits).T, "qzeros": words((zeros - shift).T, bits), "scales": scales.T}
    return parts | {"g_idx": order.int()}, valued(numbers, scales, zeros, order)


def awq(shape: torch.Size, size: int = 32) -> Packed:
    numbers, scales, zeros = drawn(shape, 4, size)
    parts = {}
    for name, columns in (("qweight", numbers.T), ("qzeros", zeros.T)):
        parts[name] = words(columns.reshape(len(columns), -1, 8)[..., list(_COLUMNS)].flatten(1), 4)
    order = torch.arange(shape[1]) // size
    return parts | {"scales": scales.T}, valued(numbers, scales, zeros, order)


def compressed(shape: torch.Size, bits: int = 4, size: int = 32, *, symmetric: bool = True) -> Packed:
    numbers, scales, zeros = drawn(shape, bits, size)
    parts = {"weight_packed": words(numbers, bits), "weight_shape": torch.tensor(shape)}
    if symmetric:
        zeros = torch.full(zeros.shape, 1 << (bits - 1))
    else:
        parts["weight_zero_point"] = words(zeros.T, bits).T
    order = torch.arange(shape[1]) // size
    return parts | {"weight_scale": scales}, valued(numbers, scales, zeros, order)


def channels(shape: torch.Size) -> Packed:
    numbers, scales, _ = drawn(shape, 8, shape[1])
    values = scales.float() * (numbers - 128)
    return {"weight": (numbers - 128).to(torch.int8), "weight_scale": scales}, values


def folder_of(path: Path, make: Callable[[torch.Size], Packed], settings: dict[str, Any]) -> tuple[Path, Any]:
    """Write a folder, its head not packed; return it and a module of the values."""
    module = make_module("Qwen2ForCausalLM", tie_word_embeddings=False, num_hidden_layers=2)
    tensors: Tensors = {}
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1 or "layers" not in name:
            tensors[name] = parameter.data.bfloat16()
            parameter.data = tensors[name].float()
            continue
        parts, values = make(parameter.shape)
        parameter.data = values
        stem = name.removesuffix(".weight")
        tensors |= {f"{stem}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    path.mkdir()
    config = module.config.to_dict() | {
        "architectures": ["Qwen2ForCausalLM"],
        "quantization_config": settings,
    }
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, str(path / "model.safetensors"))
    return path, module


GPTQ, AWQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}, {"quant_method": "awq", "bits": 4}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
FORMATS: dict[str, tuple[Callable[[torch.Size], Packed], dict[str, Any], int]] = {
    "gptq": (gptq, GPTQ, grouped.FOUR_FLOATS),
    "gptq v2": (
        lambda shape: gptq(shape, shift=0),
        GPTQ | {"checkpoint_format": "gptq_v2"},
        grouped.FOUR_FLOATS,
    ),
    "gptq 8 bits": (lambda shape: gptq(shape, 8), GPTQ | {"bits": 8}, grouped.EIGHT_FLOATS),
    "gptq act-order": (lambda shape: gptq(shape, mixed=True), GPTQ | {"desc_act": True}, grouped.FLOATS),
    "gptq groups of 16": (lambda shape: gptq(shape, size=16), GPTQ | {"group_size": 16}, grouped.FLOATS),
    "awq": (awq, AWQ, grouped.FOUR_FLOATS),
    "compressed": (compressed, PACKED, grouped.FOUR_HALVES),
    "compressed 8 bits": (lambda shape: compressed(shape, 8), PACKED, grouped.EIGHT_HALVES),
    "compressed zeros": (lambda shape: compressed(shape, symmetric=False), PACKED, grouped.FOUR_FLOATS),
    "compressed channels": (channels, PACKED | {"format": "int-quantized"}, grouped.EIGHT_HALVES),
}


@pytest.mark.parametrize("name", FORMATS)
def test_packed_weights_keep_their_bits(name: str, tmp_path: Path) -> None:
    make, settings, kind = FORMATS[name]
    torch.manual_seed(4)
    folder, module = folder_of(tmp_path / "model", make, settings)
    file, wanted = PackedWeights(folder, settings), expected(module)
    for part, parameter in module.named_parameters():
        assert torch.allclose(file.values(part), parameter, rtol=1e-6, atol=1e-7), part
    model = load(str(folder), dtype="float32", device="cpu")
    forward: Any = make_forward(model, paged(model))
    in_layers = sum(
        each.numel() for name, each in module.named_parameters() if each.ndim > 1 and "layers" in name
    )
    assert forward.weights.kinds.get(kind, 0) >= in_layers, forward.weights.kinds
    error = (logits(model) - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt()
    assert error < (1e-4 if kind == grouped.FLOATS else 0.08), error  # activations have 8 bits
    widened = load(str(folder), dtype="float32", device="cpu", weights="fp32")
    torch.testing.assert_close(logits(widened), wanted, rtol=1e-4, atol=1e-4)
    assert model.digest and model.digest != widened.digest


def test_a_model_without_a_native_step_is_widened(tmp_path: Path) -> None:
    folder, module = folder_of(tmp_path / "model", awq, AWQ)
    model = load(str(folder), dtype="bfloat16", device="cpu")
    assert isinstance(make_forward(model, paged(model)), TransformersForward)
    torch.testing.assert_close(expected(model.module).float(), expected(module), rtol=0.1, atol=0.3)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"quant_method": "bitsandbytes"}, "weights in bitsandbytes, which is not read: serve"),
        (GPTQ | {"bits": 3}, "gptq of 3 bits"),
        (AWQ | {"version": "gemv"}, "awq, version gemv"),
        (PACKED | {"format": "float-quantized"}, "compressed-tensors, format float-quantized"),
        (PACKED, "has no readable tensor model.layers.0.self_attn.q_proj.weight: download it again"),
    ],
)
def test_what_is_not_read_is_refused_with_what_would_be(
    settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    folder, _ = folder_of(tmp_path / "model", awq, settings)
    with pytest.raises(ConfigError, match=why):
        model = load(str(folder), dtype="float32", device="cpu")
        make_forward(model, paged(model))
