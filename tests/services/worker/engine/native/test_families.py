"""The native step says what transformers' modules say, for every family and for weights of any bits."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine.attention import PagedAttention
from services.worker.engine.forward import TransformersForward, make_forward
from services.worker.engine.gguf_weights import dequantised
from services.worker.engine.loading import BITS, LoadedModel, describe, load
from services.worker.engine.native import grouped
from services.worker.engine.native.families import FAMILIES, obstacle
from services.worker.engine.native.library import load as load_library
from services.worker.engine.native.llama import NativeLlama
from services.worker.engine.native.weights import Precision, WeightBlocks, WeightPacker
from services.worker.engine.spans import Span
from shared.errors import ConfigError
from shared.gguf_files import BLOCKS
from tests import gguf_rig
from tests.services.worker.engine.native.test_grouped import exact_and_bound, multiply

TINY_CHAT = Path("models/tiny_chat")
TEXT = [(7 * place + 3) % 97 for place in range(45)]
BASE: dict[str, Any] = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
BASE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128}
BASE |= {"initializer_range": 0.2} | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
WINDOWED = {"sliding_window": 8}
SHAPES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"tie_word_embeddings": False},
    "MistralForCausalLM": WINDOWED,
    "Qwen2ForCausalLM": {"use_sliding_window": True, "max_window_layers": 1} | WINDOWED,
    "Qwen3ForCausalLM": {},
    "Gemma2ForCausalLM": {"query_pre_attn_scalar": 20} | WINDOWED,
    "Gemma3ForCausalLM": {
        "query_pre_attn_scalar": 20,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
    }
    | WINDOWED,
    "MixtralForCausalLM": {"num_local_experts": 5, "num_experts_per_tok": 2} | WINDOWED,
    "Qwen3MoeForCausalLM": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "mlp_only_layers": [1],
    },
    "Phi3ForCausalLM": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    }
    | WINDOWED,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_CACHE", str(tmp_path / "cache"))


def make_module(name: str, **more: Any) -> Any:
    torch.manual_seed(5)
    stem = name.removesuffix("ForCausalLM")
    config: Any = getattr(transformers, "Gemma3TextConfig" if stem == "Gemma3" else f"{stem}Config")
    module = getattr(transformers, name)(config(**BASE | SHAPES.get(name, {}) | more)).eval()
    for part, parameter in module.named_parameters():  # Norms and biases are ones and zeros at first.
        if parameter.ndim == 1:
            parameter.data = torch.randn_like(parameter) * 0.2 + (
                0.0 if "bias" in part or "Gemma" in name else 1.0
            )
    return module


@torch.no_grad()
def expected(module: Any) -> torch.Tensor:
    module.set_attn_implementation("eager")
    logits: torch.Tensor = module(torch.tensor([TEXT])).logits[0]
    return logits


def paged(model: LoadedModel) -> PagedAttention:
    sizes: dict[str, Any] = {"kv_blocks": 20, "block_tokens": 4, "device": torch.device("cpu")}
    return PagedAttention(model.layers, dtype=torch.float32, mode="native", **sizes)


@torch.inference_mode()
def logits(model: LoadedModel, cuts: tuple[int, ...] = (), release: bool = False) -> torch.Tensor:
    """Of every token of `TEXT`, computed in pieces that end at `cuts`."""
    attention = paged(model)
    forward = make_forward(model, attention, release=release)
    assert isinstance(forward, NativeLlama)
    found, blocks = [], list(range(15))
    for first, end in zip((0, *cuts), (*cuts, len(TEXT)), strict=True):
        attention.begin([Span(first, end - first, blocks)], 0)
        rows = torch.tensor(TEXT[first:end]), torch.arange(first, end), torch.arange(end - first)
        found.append(forward(*rows).values.clone())
        attention.end()
    return torch.cat(found)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_computed_as_transformers_does(name: str) -> None:
    module = make_module(name)
    wanted = expected(module)
    assert obstacle(module) == "" and wanted.abs().max() > 0.5
    found = logits(describe(module))
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-4 * max(1.0, float(wanted.abs().max())))
    cut = logits(describe(module), (1, 2, 17, 44), release=True)
    torch.testing.assert_close(cut, found, rtol=0, atol=1e-4 * max(1.0, float(wanted.abs().max())))


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("GraniteForCausalLM", {}, "and this is GraniteForCausalLM"),
        ("LlamaForCausalLM", {"attention_bias": True}, "a layer has self_attn.o_proj.bias"),
        ("LlamaForCausalLM", {"hidden_act": "relu"}, "the activation is relu"),
    ],
)
def test_what_the_table_has_not_goes_through_transformers_and_why_is_said(
    name: str, change: dict[str, Any], why: str
) -> None:
    module = make_module(name, **change)
    assert why in obstacle(module)
    model = describe(module)
    assert isinstance(make_forward(model, paged(model)), TransformersForward)


class FromModule(WeightBlocks):
    """A file whose blocks are made of a module's weights."""

    def __init__(self, module: Any, kinds: dict[str, str], otherwise: str) -> None:
        state = module.state_dict()
        self._values: dict[str, torch.Tensor] = {name: state[name].detach().clone() for name in state}
        self._kinds, self._otherwise = kinds, otherwise
        self._is_tied = bool(module.config.tie_word_embeddings)

    @property
    def is_tied(self) -> bool:
        return self._is_tied

    def kind(self, name: str) -> str:
        return self._kinds.get(name.split(".")[-2], self._otherwise)

    def blocks(self, name: str) -> torch.Tensor:
        data = gguf_rig.quantised(self.kind(name), self._values[name].numpy())
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(len(self._values[name]), -1)

    def matrix(self, name: str) -> grouped.Grouped | torch.Tensor:
        return grouped.of_blocks(self.kind(name), self.blocks(name)) or self.values(name)

    def values(self, name: str) -> torch.Tensor:
        if self.kind(name) == "F32":
            return self._values[name]
        number = next(number for number, known in BLOCKS.items() if known[0] == self.kind(name))
        flat = dequantised(number, self.blocks(name).flatten())
        shaped: torch.Tensor = flat.view(self._values[name].shape)
        return shaped


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "mixed"])
@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "Phi3ForCausalLM"])
def test_a_files_bits_are_computed_as_the_values_that_they_stand_for(name: str, kind: str) -> None:
    kinds = (
        {"v_proj": "Q8_0", "up_proj": "Q5_1", "lm_head": "Q8_0", "o_proj": "F32"} if kind == "mixed" else {}
    )
    module = make_module(name, tie_word_embeddings=kind == "Q8_0")
    file = FromModule(module, kinds, "Q4_1" if kind == "mixed" else kind)
    for part, parameter in module.named_parameters():
        if parameter.ndim > 1:
            parameter.data = file.values(part)
    wanted = expected(module)
    described = describe(module)
    model = replace(described, precision=Precision(None, file))
    found = logits(model)
    error = (found - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt()
    assert 0 < error < 0.08, error  # activations have 8 bits
    whole, cut = found.argmax(-1), logits(model, (3, 4, 30)).argmax(-1)
    assert (whole == cut).float().mean() > 0.9


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "MixtralForCausalLM"])
def test_bf16_weights_are_computed_in_fp32(name: str) -> None:
    module = make_module(name, tie_word_embeddings=False)
    for parameter in module.parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.bfloat16().float()
    wanted = expected(module)
    found = logits(replace(describe(module), precision=Precision(16)), release=True)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize("weights", BITS)
def test_a_folders_weights_are_rounded_at_load(weights: str) -> None:
    exact = load(str(TINY_CHAT), dtype="float32", device="cpu")
    wanted = logits(exact)
    rounded = load(str(TINY_CHAT), dtype="float32", device="cpu", weights=weights)
    found = logits(rounded, release=True)
    error = (found - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt()
    low, high = {"bf16": (-1, 1e-6), "int8": (0, 0.04), "int4": (0, 0.25)}[weights]  # the model is in bf16
    assert low < error < high, error
    assert rounded.digest != exact.digest
    with pytest.raises(
        ConfigError, match=f"weights {weights} are computed by the native step.* set weights auto"
    ):
        load(str(TINY_CHAT), dtype="bfloat16", device="cpu", weights=weights)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_a_gguf_files_bits_are_kept_or_widened_as_asked(tmp_path: Path, kind: str) -> None:
    file = str(gguf_rig.of_folder(tmp_path / "tiny.gguf", TINY_CHAT, kind))
    widened = load(file, dtype="float32", device="cpu", weights="fp32")
    exact = expected(widened.module)
    torch.testing.assert_close(logits(widened), exact, rtol=0, atol=2e-3)
    kept = load(file, dtype="float32", device="cpu")
    matrix = kept.module.model.layers[0].mlp.up_proj.weight
    assert matrix.untyped_storage().nbytes() == 4  # The file alone has them.
    found = logits(kept, release=True)
    error = (found - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt()
    assert 0 < error < 0.05
    assert kept.digest and kept.digest != widened.digest


def test_a_gguf_file_for_another_dtype_is_widened(tmp_path: Path) -> None:
    file = str(gguf_rig.of_folder(tmp_path / "tiny.gguf", TINY_CHAT, "Q8_0"))
    model = load(file, dtype="bfloat16", device="cpu")
    assert model.dtype is torch.bfloat16 and model.precision.file is None
    assert expected(model.module).isfinite().all()


def _kinds() -> Iterator[tuple[str, int]]:
    numbers = {name: number for number, (name, _, _) in BLOCKS.items()}
    yield from ((name, numbers[name]) for name in grouped._READERS)


@pytest.mark.parametrize(("name", "number"), list(_kinds()))
@given(seed=st.integers(0, 2**31))
@settings(max_examples=5)
def test_every_kept_types_numbers_are_its_values(name: str, number: int, seed: int) -> None:
    dice = np.random.default_rng(seed)
    size = BLOCKS[number][2]
    raw = torch.from_numpy(dice.integers(0, 256, (16 * 8, size), np.uint8))
    halves = torch.from_numpy((dice.random((len(raw), 2)) * 0.01).astype("<f2").view(np.uint8).copy())
    if name == "Q6_K":
        raw[:, 208:] = halves[:, :2]
    else:
        raw[:, :2] = halves[:, :2]
        if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
            raw[:, 2:4] = halves[:, 2:]
    found = grouped.of_blocks(name, raw.view(16, -1))
    wanted = dequantised(number, raw.flatten()).view(16, -1)
    assert found is not None
    assert torch.equal(found.values(), wanted)
    packer = WeightPacker(load_library())
    matrix = packer.pack(found)
    activations = torch.from_numpy(dice.standard_normal((5, wanted.shape[1])).astype(np.float32))
    product = multiply(load_library(), matrix, activations)
    exact, bound = exact_and_bound(activations, wanted.double())
    assert ((product - exact).abs() <= bound).all()
