"""Packs the weights of a transformers module into panels for `llama.h`.

`release` frees the module's own copies, so that it can no longer compute."""

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from services.worker.engine.native import grouped
from services.worker.engine.native.families import family_of, norm_weight, rotations_of
from services.worker.engine.native.grouped import Grouped
from services.worker.engine.native.library import ADDRESS, INT32, INT64, declare, fields

_PROTOTYPES = {
    "gemm_packed_floats": (INT64, (INT32, INT32)),
    "gemm_packed_pair_floats": (INT64, (INT32, INT32)),
    "gemm_pack": (None, (ADDRESS, INT64, INT32, INT32, ADDRESS)),
    "gemm_pack_pair": (None, (ADDRESS, ADDRESS, INT64, INT32, INT32, ADDRESS)),
    "grouped_bytes": (INT64, (INT32, INT32, INT32)),
    "grouped_pack": (None, (INT32, ADDRESS, ADDRESS, ADDRESS, INT32, INT32, ADDRESS)),
    "matrix_scratch": (INT64, (INT32,)),
}
_HALF = 8
"""Columns of each matrix of a pair in a panel of `grouped.h`."""
_ARENA_FLOATS = 8 << 20


_PAGE_BYTES = 2 << 20
_FLOAT_BYTES = 4


class Arena:
    """Memory for weights or KV, in huge pages if possible: consecutive fp32 tensors, which keep it alive.

    The mapping is private: Linux backs shared memory with huge pages only if configured to. With small pages
    a killed worker's sockets stay open while its pages are freed."""

    def __init__(self, floats: int) -> None:
        size = max(floats * _FLOAT_BYTES, 1) + _PAGE_BYTES
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(memory, dtype=torch.float32)
        start = -whole.data_ptr() % _PAGE_BYTES // _FLOAT_BYTES
        self._free = whole[start : start + floats]

    def take(self, floats: int) -> torch.Tensor:
        """Return the next tensor `[floats]`, zeroed. Raises ValueError if the arena is full."""
        if floats > len(self._free):
            raise ValueError(f"{floats} floats wanted of {len(self._free)}")
        taken, self._free = self._free[:floats], self._free[floats:]
        return taken


class Matrix(ctypes.Structure):
    """`Matrix` of `grouped.h`. Holds an address: the weights must outlive it."""

    _fields_ = fields((ADDRESS, "data"), (INT32, "kind outputs inputs"))


class WeightBlocks(Protocol):
    """Weights of a file by the names of the module's parameters."""

    @property
    def is_tied(self) -> bool:
        """Whether the table of embeddings is the head's, too."""

    def matrix(self, name: str) -> Grouped | torch.Tensor:
        """Return a matrix in the file's bits, or in fp32 if no kernel has them."""

    def values(self, name: str) -> torch.Tensor:
        """Return a tensor in fp32."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Bits of the weights, and the file that has them if the module has not."""

    bits: int | None = None
    """16 (bf16), 8 or 4 for weights rounded at load; None: as the file has them."""
    file: WeightBlocks | None = None


AS_STORED = Precision()


@dataclass(slots=True)
class LayerWeights:
    """Weights of one layer, by their names in `llama.h`."""

    norms: dict[str, torch.Tensor] = field(default_factory=dict)
    matrices: dict[str, Matrix] = field(default_factory=dict)
    heads: list[Matrix] = field(default_factory=list)
    experts: "tuple[ctypes.Array[Matrix], ctypes.Array[Matrix]] | None" = None
    """Gates with ups, and downs."""


@dataclass(slots=True)
class ModelWeights:
    """All weights of a model, for `llama.h`."""

    layers: list[LayerWeights]
    embedding: Matrix
    final_norm: torch.Tensor
    head: Matrix
    rotations: list[tuple[torch.Tensor, torch.Tensor]]
    """Cosines and sines `[positions, rotated / 2]` of each layer."""
    held: list[torch.Tensor]
    """What the addresses point to."""
    kinds: dict[int, int]
    """Number of weights by kind of matrix."""


class WeightPacker:
    """Packs matrices of fp32 or grouped weights into arenas that grow with them, those of fp32 in bf16 if
    `halves`."""

    def __init__(self, library: ctypes.CDLL, *, halves: bool = False) -> None:
        self._halves = halves
        declare(library, _PROTOTYPES)
        self._library = library
        self._arena, self._left = Arena(1), 0
        self.held: list[torch.Tensor] = []
        self.kinds: dict[int, int] = {}

    def pack(self, weights: torch.Tensor | Grouped) -> Matrix:
        """Return a packed matrix `[outputs, inputs]`."""
        if isinstance(weights, torch.Tensor):
            return self._floats(weights)
        return self._grouped(weights, weights.numbers.shape[0])

    def pack_pair(self, gate: torch.Tensor | Grouped, up: torch.Tensor | Grouped) -> Matrix:
        """Return two matrices of equal shape and kind as a pair."""
        if isinstance(gate, Grouped) and isinstance(up, Grouped):
            outputs = gate.numbers.shape[0]
            padded = -(-outputs // _HALF) * _HALF
            order = torch.arange(2 * padded).view(2, -1, _HALF).transpose(0, 1).reshape(-1)
            both = grouped.joined([_padded(gate, padded), _padded(up, padded)]).rows(order)
            return self._grouped(both, outputs)
        assert isinstance(gate, torch.Tensor) and isinstance(up, torch.Tensor)
        return self._floats(gate, up)

    def _floats(self, *parts: torch.Tensor) -> Matrix:
        """Pack one matrix, or a pair."""
        library, (outputs, inputs), is_pair = self._library, parts[0].shape, len(parts) > 1
        size_of = library.gemm_packed_pair_floats if is_pair else library.gemm_packed_floats
        pack, size = library.gemm_pack_pair if is_pair else library.gemm_pack, int(size_of(outputs, inputs))
        packed = Arena(size).take(size) if self._halves else self._take(size)
        parts = tuple(part.contiguous() for part in parts)
        addresses = (part.data_ptr() for part in parts)
        pack(*addresses, inputs, outputs, inputs, packed.data_ptr())
        if not self._halves:
            return self._described(packed, grouped.FLOATS, outputs, inputs, len(parts))
        half = self._take(-(-size // 32) * 16)
        half.view(torch.bfloat16)[:size] = packed
        return self._described(half, grouped.HALVES, outputs, inputs, len(parts))

    def rows(self, values: torch.Tensor) -> Matrix:
        """Return fp32 `[outputs, inputs]` of which rows are read only."""
        return self._described(values.contiguous(), grouped.ROWS, *values.shape)

    def _grouped(self, weights: Grouped, outputs: int) -> Matrix:
        rows, inputs = weights.numbers.shape
        floats = -(-self._library.grouped_bytes(weights.kind, rows, inputs) // 64) * 16
        packed = self._take(floats)
        least = None if weights.least is None else weights.least.contiguous()
        parts = weights.numbers.contiguous(), weights.scales.contiguous()
        addresses = [part.data_ptr() for part in parts] + [None if least is None else least.data_ptr()]
        self._library.grouped_pack(weights.kind, *addresses, rows, inputs, packed.data_ptr())
        return self._described(packed, weights.kind, outputs, inputs, rows // outputs)

    def _take(self, floats: int) -> torch.Tensor:
        if floats > self._left:
            self._left = max(floats, _ARENA_FLOATS)
            self._arena = Arena(self._left)
        self._left -= floats
        return self._arena.take(floats)

    def _described(self, data: torch.Tensor, kind: int, outputs: int, inputs: int, times: int = 1) -> Matrix:
        self.held.append(data)
        self.kinds[kind] = self.kinds.get(kind, 0) + outputs * inputs * times
        return Matrix(data.data_ptr(), kind, outputs, inputs)


def _padded(weights: Grouped, outputs: int) -> Grouped:
    more = outputs - weights.numbers.shape[0]
    parts = weights.numbers, weights.scales, weights.least
    padded = [None if part is None else torch.nn.functional.pad(part, (0, 0, 0, more)) for part in parts]
    assert padded[0] is not None and padded[1] is not None
    return Grouped(weights.kind, padded[0], padded[1], padded[2])


def pack(
    library: ctypes.CDLL, module: Any, positions: int, *, release: bool, precision: Precision = AS_STORED
) -> ModelWeights:
    """Return the packed weights of a module of a known family, and its rotations up to `positions`."""
    packer = WeightPacker(library, halves=precision.bits == 16)
    family, body = family_of(module), module.model
    layers = []
    for index, layer in enumerate(body.layers):
        own = LayerWeights()

        def read(name: str, layer: Any = layer, index: int = index) -> torch.Tensor | Grouped:
            linear = layer.get_submodule(name)
            return _weights(linear.weight, f"model.layers.{index}.{name}.weight", precision)

        own.heads = [packer.pack(part) for part in _joined([read(name) for name in family.heads])]
        own.matrices["output"] = packer.pack(read(family.output))
        if hasattr(layer.mlp, "experts"):
            own.matrices["router"] = packer.pack(layer.mlp.gate.weight)
            own.experts = _experts(packer, layer.mlp.experts, precision)
        else:
            own.matrices["down"] = packer.pack(read(family.down))
            own.matrices["gate_up"] = packer.pack_pair(*_pair([read(name) for name in family.gates]))
        for name, part in family.norms.items():
            own.norms[name] = norm_weight(layer.get_submodule(part), family.norm_offset)
        biases = [layer.get_submodule(name).bias for name in family.heads]
        if biases[0] is not None:
            own.norms["bias"] = torch.cat([bias.detach().float() for bias in biases])
        if release:
            names = [*family.heads, family.output]
            names += [] if own.experts else [*family.gates, family.down]
            _release([layer.get_submodule(name) for name in names])
            if own.experts:
                layer.mlp.experts.gate_up_proj.data = layer.mlp.experts.down_proj.data = torch.empty(0)
        layers.append(own)
    head_weight, embedded = module.lm_head.weight, body.embed_tokens.weight
    file = precision.file
    tied = embedded.data_ptr() == head_weight.data_ptr() if file is None else file.is_tied
    head = packer.pack(_weights(head_weight, "lm_head.weight", precision))
    embedding = head
    if not tied:
        found = _weights(embedded, "model.embed_tokens.weight", precision)
        if isinstance(found, torch.Tensor) and precision.bits != 16:
            embedding = packer.rows(found.detach())
        else:
            embedding = packer.pack(found)
    if release:
        _release([module.lm_head, body.embed_tokens] if tied or file else [module.lm_head])
    rotations = rotations_of(module, positions)
    norm = norm_weight(body.norm, family.norm_offset)
    held = [*packer.held, *(part for pair in rotations for part in pair)]
    return ModelWeights(layers, embedding, norm, head, rotations, held, packer.kinds)


def _experts(
    packer: WeightPacker, experts: Any, precision: Precision
) -> "tuple[ctypes.Array[Matrix], ctypes.Array[Matrix]]":
    count = len(experts.down_proj)
    gates, downs = (Matrix * count)(), (Matrix * count)()
    for expert in range(count):
        gates[expert] = packer.pack_pair(*_pair([_weights(experts.gate_up_proj[expert], "", precision)]))
        downs[expert] = packer.pack(_weights(experts.down_proj[expert], "", precision))
    return gates, downs


def _weights(values: torch.Tensor, name: str, precision: Precision) -> torch.Tensor | Grouped:
    file = precision.file
    if precision.bits is None:
        return values if file is None else file.matrix(name)
    values = values.detach().float() if file is None else file.values(name)
    if precision.bits == 16 or values.shape[1] % grouped.GROUP:
        return values
    is_table = name in ("lm_head.weight", "model.embed_tokens.weight")
    return grouped.of_values(values, 8 if is_table else precision.bits)


def _joined(parts: list[torch.Tensor | Grouped]) -> list[torch.Tensor | Grouped]:
    """Return parts of one kind as one."""
    plain = [part for part in parts if isinstance(part, torch.Tensor)]
    packed = [part for part in parts if isinstance(part, Grouped)]
    if len(plain) == len(parts):
        return [torch.cat(plain)]
    return [grouped.joined(packed)] if not plain and len({part.kind for part in packed}) == 1 else parts


def _pair(parts: list[torch.Tensor | Grouped]) -> tuple[torch.Tensor | Grouped, torch.Tensor | Grouped]:
    """Return gate and up, of one kind."""
    if len(parts) == 1:
        whole = parts[0]
        if isinstance(whole, torch.Tensor):
            return whole.chunk(2)[0], whole.chunk(2)[1]
        halves = torch.arange(whole.numbers.shape[0]).chunk(2)
        return whole.rows(halves[0]), whole.rows(halves[1])
    gate, up = parts
    if isinstance(gate, Grouped) and isinstance(up, Grouped) and gate.kind == up.kind:
        return gate, up
    return _widened(gate), _widened(up)


def _widened(part: torch.Tensor | Grouped) -> torch.Tensor:
    return part if isinstance(part, torch.Tensor) else part.values()


def _release(linears: Sequence[Any]) -> None:
    for linear in linears:
        linear.weight.data = torch.empty(0)
