"""A plain fp32 Llama in C++ (`llama.h`): weights are packed at load, and a step is one call."""

import ctypes
from typing import Any

import torch

from services.worker.engine.attention import PagedAttention
from services.worker.engine.llama_parts import is_rotation_fixed
from services.worker.engine.logits import Logits
from services.worker.engine.native.library import KvPool, Spans, declare
from services.worker.engine.native.weights import ModelWeights, pack
from services.worker.engine.paged import Shape
from services.worker.engine.states import StateTap
from shared.errors import InternalError

_LATE = -104
"""`LLAMA_LATE` of `llama.h`."""


class LlamaLayer(ctypes.Structure):
    """Weights and pools of one layer, laid out as in `llama.h`."""

    _fields_ = (
        ("input_norm", ctypes.c_void_p),
        ("query_key_value", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("post_norm", ctypes.c_void_p),
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("pool", KvPool),
    )


class LlamaModel(ctypes.Structure):
    """Sizes, weights and layers of a model, laid out as in `llama.h`."""

    _fields_ = (
        ("layers", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
        ("intermediate", ctypes.c_int32),
        ("q_heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("vocabulary", ctypes.c_int32),
        ("positions", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("scaling", ctypes.c_float),
        ("embedding", ctypes.c_void_p),
        ("final_norm", ctypes.c_void_p),
        ("head", ctypes.c_void_p),
        ("cosine", ctypes.c_void_p),
        ("sine", ctypes.c_void_p),
        ("layer", ctypes.POINTER(LlamaLayer)),
    )


class LlamaStep(ctypes.Structure):
    """Rows and scratch memory of a step, laid out as in `llama.h`."""

    _fields_ = (
        ("rows", ctypes.c_int32),
        ("kept", ctypes.c_int32),
        ("tokens", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("kept_rows", ctypes.c_void_p),
        ("spans", ctypes.POINTER(Spans)),
        ("hidden", ctypes.c_void_p),
        ("normed", ctypes.c_void_p),
        ("heads", ctypes.c_void_p),
        ("attended", ctypes.c_void_p),
        ("gated", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("likeliest", ctypes.c_void_p),
        ("highest", ctypes.c_void_p),
        ("tap_layer", ctypes.c_int32),
        ("taps", ctypes.c_int32),
        ("tap_spans", ctypes.c_void_p),
        ("tapped", ctypes.c_void_p),
    )


_MODEL, _STEP = ctypes.POINTER(LlamaModel), ctypes.POINTER(LlamaStep)
_PROTOTYPES = {
    "llama_embed": (ctypes.c_int32, (_MODEL, _STEP)),
    "llama_layer_qkv": (ctypes.c_int32, (_MODEL, ctypes.c_int32, _STEP)),
    "llama_layer_attend": (ctypes.c_int32, (_MODEL, ctypes.c_int32, _STEP)),
    "llama_layer_rest": (None, (_MODEL, ctypes.c_int32, _STEP)),
    "llama_logits": (None, (_MODEL, _STEP)),
    "llama_forward": (ctypes.c_int32, (_MODEL, _STEP, ctypes.c_void_p, ctypes.c_double)),
}


def is_computable(module: Any) -> bool:
    """Return whether a table can hold the rotations of a plain fp32 LlamaForCausalLM on the CPU."""
    on_cpu = next(module.parameters()).device.type == "cpu"
    return is_rotation_fixed(module.config) and on_cpu and module.model.layers[0].self_attn.head_dim % 2 == 0


class StepScratch:
    """Tensors that a step writes to, by name; reallocated only for more rows than ever before."""

    def __init__(self, widths: dict[str, tuple[int, torch.dtype]]) -> None:
        self._widths = widths
        self._rows = 0
        self._tensors: dict[str, torch.Tensor] = {}

    def grow(self, rows: int) -> bool:
        """Ensure room for `rows` in every tensor; return whether they were reallocated."""
        if rows <= self._rows:
            return False
        self._rows = max(rows, self._rows * 3 // 2)
        self._tensors.clear()
        for name, (width, dtype) in self._widths.items():
            self._tensors[name] = torch.zeros(self._rows, width, dtype=dtype)
        return True

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def point(self, step: LlamaStep) -> None:
        """Point the step's fields of these names at the tensors."""
        for name, tensor in self._tensors.items():
            setattr(step, name, tensor.data_ptr())


class NativeLlama:
    """`Forward` of a plain `LlamaForCausalLM`; see `is_computable`.

    `release` frees the module's own matrices, so that it can no longer compute. The functions of `llama.h`
    take `model` and the result of `prepare`, for callers that run single layers.
    """

    def __init__(
        self,
        module: Any,
        kv: PagedAttention,
        library: ctypes.CDLL,
        *,
        threads: int,
        release: bool,
        tap: StateTap | None = None,
    ) -> None:
        declare(library, _PROTOTYPES)
        self._library = library
        self._kv = kv
        self._tap = tap
        config = module.config
        self._vocabulary = module.lm_head.weight.shape[0]
        self.model = _describe(module, threads)
        self._weights = pack(library, module, config.max_position_embeddings, release=release)
        self._layers = _layers(self._weights, kv)
        self._point_at_weights()
        self._step = LlamaStep()
        hidden, query = config.hidden_size, self.model.q_heads * self.model.head_dim
        joined = query + 2 * self.model.kv_heads * self.model.head_dim
        self._scratch = StepScratch(
            {
                "hidden": (hidden, torch.float32),
                "normed": (hidden, torch.float32),
                "heads": (joined, torch.float32),
                "attended": (query, torch.float32),
                "gated": (config.intermediate_size, torch.float32),
                "lse": (self.model.q_heads, torch.float32),
            }
        )
        self._results = StepScratch(
            {
                "logits": (self._vocabulary, torch.float32),
                "likeliest": (1, torch.int64),
                "highest": (1, torch.float32),
            }
        )

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor) -> Logits:
        """See `forward.Forward`."""
        step = self.prepare(tokens, positions, kept)
        if self._kv.is_partitioned:
            answer = self._run_partitioned(step)
        else:
            answer = self._library.llama_forward(self.model, step, *self._kv.stream)
        if answer == _LATE:
            raise InternalError(f"KV of a layer did not arrive from the host within {self._kv.stream[1]:g} s")
        if answer:
            raise InternalError(
                f"the native Llama refused a step of {len(tokens)} rows: {answer} (see llama.h)"
            )
        return self.logits(len(kept))

    def _run_partitioned(self, step: LlamaStep) -> int:
        """`llama_forward` with creditors: send their parts before each attention and merge them after it.

        Rows without remote blocks use the same kernels in the same order.
        """
        library, model, kv, rows = self._library, self.model, self._kv, step.rows
        heads = self._scratch["heads"][:rows].view(rows, -1, model.head_dim)
        queries, keys = heads[:, : model.q_heads], heads[:, model.q_heads : -model.kv_heads]
        values = heads[:, -model.kv_heads :]
        attended = self._scratch["attended"][:rows].view(rows, model.q_heads, model.head_dim)
        lse, shape = self._scratch["lse"][:rows], Shape(model.scaling)
        step.lse = lse.data_ptr()
        failed: int = library.llama_embed(model, step)
        for layer in range(model.layers):
            failed = failed or library.llama_layer_qkv(model, layer, step)
            if failed:
                return failed
            kv.send(layer, queries, keys, values, shape)
            kv.enter(layer)
            failed = library.llama_layer_attend(model, layer, step)
            if failed:
                return failed
            kv.leave(layer)
            kv.join(layer, attended, lse)
            library.llama_layer_rest(model, layer, step)
        library.llama_logits(model, step)
        return 0

    def logits(self, kept: int) -> Logits:
        """Return the logits of the last step's `kept` rows."""
        results = self._results
        return Logits(
            results["logits"][:kept],
            results["highest"].view(-1)[:kept],
            results["likeliest"].view(-1)[:kept],
            self._scratch["normed"][:kept],
        )

    def prepare(self, tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor) -> LlamaStep:
        """Return the step's description, which points at the given tensors and the current spans."""
        step, rows = self._step, len(tokens)
        if self._scratch.grow(max(rows, len(kept))):
            self._scratch.point(step)
        if self._results.grow(max(1, len(kept))):
            self._results.point(step)
        step.rows, step.kept = rows, len(kept)
        step.tokens, step.positions = tokens.data_ptr(), positions.data_ptr()
        step.slots, step.kept_rows = self._kv.slots.data_ptr(), kept.data_ptr()
        step.spans, step.lse = ctypes.pointer(self._kv.native_spans), None
        step.taps = 0
        if self._tap is not None and self._tap.count:
            tap = self._tap
            step.tap_layer, step.taps = tap.layer, tap.count
            step.tap_spans, step.tapped = tap.spans.data_ptr(), tap.states.data_ptr()
            tap.is_filled = True
        return step

    def _point_at_weights(self) -> None:
        model, weights = self.model, self._weights
        model.embedding = None if weights.embedding is None else weights.embedding.data_ptr()
        model.final_norm = weights.final_norm.data_ptr()
        model.head = weights.head.data_ptr()
        model.cosine, model.sine = weights.cosine.data_ptr(), weights.sine.data_ptr()
        model.positions = weights.cosine.shape[0]
        model.layer = self._layers


def _describe(module: Any, threads: int) -> LlamaModel:
    config, attention = module.config, module.model.layers[0].self_attn
    return LlamaModel(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        q_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        vocabulary=module.lm_head.weight.shape[0],
        threads=threads,
        eps=config.rms_norm_eps,
        scaling=attention.scaling,
    )


def _layers(weights: ModelWeights, kv: PagedAttention) -> "ctypes.Array[LlamaLayer]":
    layers = (LlamaLayer * len(weights.layers))()
    for index, layer in enumerate(weights.layers):
        for name in layer.__slots__:
            setattr(layers[index], name, getattr(layer, name).data_ptr())
        layers[index].pool = kv.native_pool(index)
    return layers
