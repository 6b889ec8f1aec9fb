"""Weights as numbers of 4 or 8 bits in groups, for `grouped.h`: a GGUF file's blocks as they are, or rounded
values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

FLOATS, FOUR_HALVES, FOUR_FLOATS, EIGHT_HALVES, EIGHT_FLOATS, EIGHT_SIXTEEN, ROWS, HALVES = range(8)
"""`MatrixKind` of `grouped.h`."""
NAMES = ("fp32", "4 bits", "4 bits", "8 bits", "8 bits", "8 bits", "fp32", "bf16")
GROUP = 32


@dataclass(frozen=True, slots=True)
class Grouped:
    """A matrix `[outputs, inputs]` whose weights are `scale * number + least`."""

    kind: int
    numbers: torch.Tensor
    """uint8 `[outputs, inputs]`; of 8 bits as the bytes of int8."""
    scales: torch.Tensor
    """fp32 `[outputs, groups]`."""
    least: torch.Tensor | None = None
    """fp32 `[outputs, groups]`; None: zeros."""

    def values(self) -> torch.Tensor:
        """Return the weights in fp32."""
        signed = self.kind >= EIGHT_HALVES
        numbers = (self.numbers.view(torch.int8) if signed else self.numbers).float()
        groups = numbers.reshape(*self.scales.shape, -1) * self.scales[..., None]
        return (groups if self.least is None else groups + self.least[..., None]).flatten(1)

    def rows(self, order: torch.Tensor) -> "Grouped":
        """Return the matrix of the rows in `order`."""
        least = None if self.least is None else self.least[order]
        return Grouped(self.kind, self.numbers[order], self.scales[order], least)


def joined(parts: Sequence[Grouped]) -> Grouped:
    """Return matrices of one kind as one, with concatenated outputs."""
    least = [part.least for part in parts if part.least is not None]
    numbers, scales = (torch.cat([getattr(part, name) for part in parts]) for name in ("numbers", "scales"))
    return Grouped(parts[0].kind, numbers, scales, torch.cat(least) if least else None)


def of_blocks(type_name: str, blocks: torch.Tensor) -> Grouped | None:
    """Return the weights of a GGUF matrix, uint8 `[outputs, bytes]`; None for a type that is not kept."""
    reader = _READERS.get(type_name)
    if reader is None:
        return None
    size, read = reader
    told: Any = read(blocks.view(-1, size))
    kind, *parts = told
    numbers, scales, *least = (part.contiguous().view(blocks.shape[0], -1) for part in parts)
    return Grouped(kind, numbers.view(torch.uint8), scales, least[0] if least else None)


def of_values(values: torch.Tensor, bits: int) -> Grouped:
    """Return fp32 `[outputs, inputs]` rounded to 8 bits, or to 4 between a group's extremes."""
    groups = values.reshape(values.shape[0], -1, GROUP)
    if bits == 8:
        scales = (groups.abs().amax(-1) / 127).half().float()
        numbers = (groups * _inverse(scales)[..., None]).round().clamp(-127, 127).to(torch.int8)
        return Grouped(EIGHT_HALVES, numbers.view(torch.uint8).view(values.shape), scales)
    least, most = groups.aminmax(dim=-1)
    least = least.half().float()
    scales = ((most - least) / 15).half().float()
    numbers = ((groups - least[..., None]) * _inverse(scales)[..., None]).round().clamp(0, 15)
    return Grouped(FOUR_HALVES, numbers.to(torch.uint8).view(values.shape), scales, least)


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales == 0, 0.0, 1 / scales)


_Parts = tuple[int | torch.Tensor, ...]


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """Return the low, then the high halves of the last dimension's bytes."""
    return torch.cat([data & 15, data >> 4], -1)


def _bits(data: torch.Tensor, width: int) -> torch.Tensor:
    """Return fields of `width` bits, `[…, 8 / width, bytes]`, the lowest first."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)
    return (data[..., None, :] >> shifts[:, None]) & ((1 << width) - 1)


def _fifth(data: torch.Tensor) -> torch.Tensor:
    """Return the bits of 4 bytes, `[blocks, 32]`, as 16 or 0."""
    return ((data[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1) << 4


def _q5_0(blocks: torch.Tensor) -> _Parts:
    numbers = (_nibbles(blocks[:, 6:]) | _fifth(blocks[:, 2:6])).to(torch.int8) - 16
    return EIGHT_HALVES, numbers, _half(blocks, 0)


def _q5_1(blocks: torch.Tensor) -> _Parts:
    numbers = _nibbles(blocks[:, 8:]) | _fifth(blocks[:, 4:8])
    return EIGHT_FLOATS, numbers, _half(blocks, 0), _half(blocks, 2)


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and least values `[blocks, 8]` of Q4_K and Q5_K."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], 1).float()
    least = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], 1).float()
    return _half(blocks, 0) * scales, -_half(blocks, 2) * least


def _q4_k(blocks: torch.Tensor) -> _Parts:
    return FOUR_FLOATS, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)), *_k_scales(blocks)


def _q5_k(blocks: torch.Tensor) -> _Parts:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return EIGHT_FLOATS, low | (_bits(blocks[:, 16:48], 1) << 4), *_k_scales(blocks)


def _q6_k(blocks: torch.Tensor) -> _Parts:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    high = _bits(blocks[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 8, 32)
    scales = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return EIGHT_SIXTEEN, (low | (high << 4)).to(torch.int8) - 32, scales


_READERS: dict[str, tuple[int, Callable[[torch.Tensor], _Parts]]] = {
    "Q4_0": (18, lambda rows: (FOUR_HALVES, _nibbles(rows[:, 2:]), _half(rows, 0), -8 * _half(rows, 0))),
    "Q4_1": (20, lambda rows: (FOUR_HALVES, _nibbles(rows[:, 4:]), _half(rows, 0), _half(rows, 2))),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, lambda rows: (EIGHT_HALVES, rows[:, 2:], _half(rows, 0))),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
"""Bytes of a block and its reader, by type."""
