"""The native Llama, one layer at a time: each waits for its KV, and says when it is done with it.

While every layer is present for good, a step is one call, as it is without Pie.
"""

import ctypes
from typing import Any

import torch

from services.worker.engine.logits import Logits
from services.worker.engine.native.library import describe_pool
from services.worker.engine.native.llama import LlamaStep, NativeLlama, PagedKv
from services.worker.pie.store import LayerStore
from shared.errors import InternalError


class SwappedLlama(NativeLlama):
    """A `Forward`; see `NativeLlama`. `kv` has the step's spans, `store` the layers."""

    def __init__(
        self,
        module: Any,
        kv: PagedKv,
        store: LayerStore,
        library: ctypes.CDLL,
        *,
        threads: int,
        release: bool,
    ) -> None:
        super().__init__(module, kv, library, threads=threads, release=release)
        self._store = store
        self._pointed = -1

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor) -> Logits:
        """See `services.worker.engine.forward.Forward`."""
        if self._store.is_static:
            self._point_at_slots()
            return super().__call__(tokens, positions, kept)
        self._pointed = -1
        step = self.prepare(tokens, positions, kept)
        self._expect_zero(self._library.llama_embed(self.model, step), step)
        for layer in range(self.model.layers):
            self._layer(layer, step)
        self._library.llama_logits(self.model, step)
        return self.logits(len(kept))

    def _layer(self, layer: int, step: LlamaStep) -> None:
        library, model = self._library, self.model
        self._layers[layer].pool = describe_pool(*self._store.enter(layer))
        self._expect_zero(library.llama_layer_qkv(model, layer, step), step)
        self._expect_zero(library.llama_layer_attend(model, layer, step), step)
        self._store.leave(layer)
        library.llama_layer_rest(model, layer, step)

    def _point_at_slots(self) -> None:
        """Once after each change: slots stand still from here on."""
        if self._pointed != self._store.version:
            self._pointed = self._store.version
            for layer in range(self.model.layers):
                self._layers[layer].pool = describe_pool(*self._store.views(layer))

    def _expect_zero(self, answer: int, step: LlamaStep) -> None:
        if answer:
            raise InternalError(
                f"the native Llama refused a step of {step.rows} rows: {answer} (see llama.h)"
            )
