"""A decoder of Llama's kind in C++ (`llama.h`): weights are packed at load, and a step is one call."""

import ctypes
from typing import Any

import torch

from services.worker.engine.attention import PagedAttention
from services.worker.engine.native import library as native
from services.worker.engine.native.families import GATES, activation, experts_of, family_of
from services.worker.engine.native.grouped import NAMES
from services.worker.engine.native.weights import AS_STORED, Matrix, ModelWeights, Precision, pack
from services.worker.engine.paged import Shape
from services.worker.engine.sampler import Logits
from services.worker.engine.states import StateTap
from shared.errors import InternalError

_LATE = -104
"""`LLAMA_LATE` of `llama.h`."""


class LlamaLayer(ctypes.Structure):
    """Weights and pools of one layer, laid out as in `llama.h`."""

    _fields_ = native.fields(
        (native.ADDRESS, "input_norm query_norm key_norm attended_norm post_norm mlp_norm bias cosine sine"),
        (Matrix * 3, "query_key_value"),
        (Matrix, "output gate_up down router"),
        (ctypes.POINTER(Matrix), "experts_gate_up experts_down"),
        (native.INT32, "window_tokens"),
        (native.KvPool, "pool"),
    )


class LlamaModel(ctypes.Structure):
    """Sizes, weights and layers of a model, laid out as in `llama.h`."""

    _fields_ = native.fields(
        (native.INT32, "layers hidden intermediate q_heads kv_heads head_dim rotated vocabulary positions"),
        (native.INT32, "gate experts chosen sums_to_one threads"),
        (native.FLOAT, "eps scaling softcap logits_softcap embedding_scale"),
        (Matrix, "embedding"),
        (native.ADDRESS, "final_norm"),
        (Matrix, "head"),
        (ctypes.POINTER(LlamaLayer), "layer"),
    )


class LlamaStep(ctypes.Structure):
    """Rows and scratch memory of a step, laid out as in `llama.h`."""

    _fields_ = native.fields(
        (native.INT32, "rows kept"),
        (native.ADDRESS, "tokens positions slots kept_rows"),
        (ctypes.POINTER(native.Spans), "spans"),
        (native.ADDRESS, "hidden normed heads attended gated lse rounded routed logits likeliest highest"),
        (native.INT32, "tap_layer taps"),
        (native.ADDRESS, "tap_spans tapped"),
    )


_MODEL, _STEP = ctypes.POINTER(LlamaModel), ctypes.POINTER(LlamaStep)
_PROTOTYPES = {
    "llama_embed": (native.INT32, (_MODEL, _STEP)),
    "llama_layer_qkv": (native.INT32, (_MODEL, native.INT32, _STEP)),
    "llama_layer_attend": (native.INT32, (_MODEL, native.INT32, _STEP)),
    "llama_layer_rest": (None, (_MODEL, native.INT32, _STEP)),
    "llama_logits": (None, (_MODEL, _STEP)),
    "llama_forward": (native.INT32, (_MODEL, _STEP, native.ADDRESS, native.DOUBLE)),
}


class StepScratch:
    """Tensors that a step writes to, by name; reallocated only for more rows than ever before."""

    def __init__(self, step: LlamaStep, **widths: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.rows = 0
        self._step, self._widths = step, widths

    def grow(self, rows: int) -> None:
        """Make room for `rows` in every tensor, and point the step's fields of their names at them."""
        self.rows = max(rows, self.rows * 3 // 2)
        for name, width in self._widths.items():
            dtype = torch.int64 if name == "likeliest" else torch.float32
            self.tensors[name] = torch.zeros(self.rows, width, dtype=dtype)
            setattr(self._step, name, self.tensors[name].data_ptr())


class NativeLlama:
    """`Forward` of a causal language model for which `families.obstacle` finds none.

    `release` frees the module's own matrices, so that it can no longer compute. The functions of `llama.h`
    take `model` and the result of `prepare`, for callers that run single layers."""

    def __init__(
        self,
        module: Any,
        kv: PagedAttention,
        library: ctypes.CDLL,
        *,
        threads: int,
        release: bool,
        tap: StateTap | None = None,
        precision: Precision = AS_STORED,
    ) -> None:
        native.declare(library, _PROTOTYPES)
        self._library, self._kv, self._tap = library, kv, tap
        config, vocabulary = module.config, len(module.lm_head.weight)
        most = config.max_position_embeddings
        weights = pack(library, module, most, release=release, precision=precision)
        self.weights = weights
        self.model = _describe(module, threads, vocabulary)
        self.model.embedding, self.model.head = weights.embedding, weights.head
        self.model.final_norm = weights.final_norm.data_ptr()
        self.model.positions, self.model.rotated = most, 2 * weights.rotations[0][0].shape[1]
        self.model.layer = self._layers = _layers(weights, kv)
        self._step = LlamaStep()
        q_heads, kv_heads, dim = self.model.q_heads, self.model.kv_heads, self.model.head_dim
        widest = max(config.intermediate_size, getattr(config, "moe_intermediate_size", None) or 0)
        self._scratch = StepScratch(
            self._step,
            hidden=config.hidden_size,
            normed=config.hidden_size,
            heads=(q_heads + 2 * kv_heads) * dim,
            attended=q_heads * dim,
            gated=widest,
            routed=self.model.experts and self.model.experts + 2 * config.hidden_size,
            lse=q_heads,
            rounded=library.matrix_scratch(max(q_heads * dim, widest, config.hidden_size)),
        )
        self._results = StepScratch(self._step, logits=self.model.vocabulary, likeliest=1, highest=1)

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor) -> Logits:
        step, resident = self.prepare(tokens, positions, kept), self._kv.resident
        if self._kv.is_partitioned:
            answer = self._run_partitioned(step)
        elif resident is not None and resident.is_streaming:
            answer = self._library.llama_forward(self.model, step, *resident.stream_of_step)
        else:
            answer = self._library.llama_forward(self.model, step, None, 0.0)
        if answer == _LATE:
            timeout_s = 0.0 if resident is None else resident.stream_of_step[1]
            raise InternalError(f"KV of a layer did not arrive from the host within {timeout_s:g} s")
        if answer:
            raise InternalError(
                f"the native Llama refused a step of {len(tokens)} rows: {answer} (see llama.h)"
            )
        return self.logits(len(kept))

    def describe_weights(self) -> str:
        """Return the kinds of the matrices, with the share of the weights that each has."""
        kinds = self.weights.kinds
        whole = sum(kinds.values())
        return ", ".join(
            f"{NAMES[kind]} {100 * count / whole:.0f} %" for kind, count in sorted(kinds.items())
        )

    def _run_partitioned(self, step: LlamaStep) -> int:
        """`llama_forward` with creditors: send their parts before each attention and merge them after it.

        Rows without remote blocks use the same kernels in the same order."""
        library, model, kv, rows = self._library, self.model, self._kv, step.rows
        scratch = self._scratch.tensors
        heads = scratch["heads"][:rows].view(rows, -1, model.head_dim)
        queries, keys = heads[:, : model.q_heads], heads[:, model.q_heads : -model.kv_heads]
        values = heads[:, -model.kv_heads :]
        attended = scratch["attended"][:rows].view(rows, model.q_heads, model.head_dim)
        lse, shape = scratch["lse"][:rows], Shape(model.scaling, model.softcap or None)
        step.lse = lse.data_ptr()
        failed: int = library.llama_embed(model, step)
        for layer in range(model.layers):
            failed = failed or library.llama_layer_qkv(model, layer, step)
            if failed:
                return failed
            kv.send(layer, queries, keys, values, shape)
            kv.enter(layer)
            if any(kv.windows):
                step.spans = ctypes.pointer(native.describe_spans(kv.own_part(layer)))
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
        results = self._results.tensors
        return Logits(
            results["logits"][:kept],
            results["highest"].view(-1)[:kept],
            results["likeliest"].view(-1)[:kept],
            self._scratch.tensors["normed"][:kept],
        )

    def prepare(self, tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor) -> LlamaStep:
        """Return the step's description, which points at the given tensors and the current spans."""
        step, packed, tap = self._step, self._kv.packed, self._tap
        step.rows, step.kept = len(tokens), len(kept)
        if self._scratch.rows < max(step.rows, step.kept):
            self._scratch.grow(max(step.rows, step.kept))
        if self._results.rows < max(1, step.kept):
            self._results.grow(max(1, step.kept))
        step.tokens, step.positions = tokens.data_ptr(), positions.data_ptr()
        step.slots, step.kept_rows = packed.slots.ctypes.data, kept.data_ptr()
        step.spans, step.lse, step.taps = ctypes.pointer(native.describe_spans(packed)), None, 0
        if tap is not None and tap.count:
            step.tap_layer, step.taps = tap.layer, tap.count
            step.tap_spans, step.tapped = tap.spans.data_ptr(), tap.states.data_ptr()
            tap.is_filled = True
        return step


def _describe(module: Any, threads: int, vocabulary: int) -> LlamaModel:
    config, attention = module.config, module.model.layers[0].self_attn
    scales = family_of(module).scales_embedding
    return LlamaModel(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        q_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        vocabulary=vocabulary,
        gate=GATES[activation(config)],
        experts=experts_of(config),
        chosen=getattr(config, "num_experts_per_tok", None) or 0,
        sums_to_one=getattr(config, "norm_topk_prob", True),
        threads=threads,
        eps=config.rms_norm_eps,
        scaling=attention.scaling,
        softcap=getattr(config, "attn_logit_softcapping", None) or 0.0,
        logits_softcap=getattr(config, "final_logit_softcapping", None) or 0.0,
        embedding_scale=config.hidden_size**0.5 if scales else 1.0,
    )


def _layers(weights: ModelWeights, kv: PagedAttention) -> "ctypes.Array[LlamaLayer]":
    if kv.native is None:
        raise InternalError("pools are described for the native library, and there is none")
    layers = (LlamaLayer * len(weights.layers))()
    parts = zip(layers, weights.layers, weights.rotations, kv.windows, kv.native.pools, strict=True)
    for described, layer, (cosine, sine), window_tokens, pool in parts:
        described.cosine, described.sine = cosine.data_ptr(), sine.data_ptr()
        for name, tensor in layer.norms.items():
            setattr(described, name, tensor.data_ptr())
        for name, matrix in layer.matrices.items():
            setattr(described, name, matrix)
        for place, matrix in enumerate(layer.heads):
            described.query_key_value[place] = matrix
        if layer.experts:
            described.experts_gate_up, described.experts_down = layer.experts
        described.window_tokens, described.pool = window_tokens, pool
    return layers
