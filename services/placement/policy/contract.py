"""Interfaces of placement policies and packing policies, and the types they exchange.

A packing policy receives every arrival, growth and end, and returns placements and moves. Sizes are allocated
blocks of the same size on all workers. The policy does not choose between KV and token moves.
"""

from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol, TypeGuard, runtime_checkable

import numpy as np
import numpy.typing as npt

from shared.errors import InvalidRequest


@dataclass(slots=True)
class Room:
    """One worker's memory, load and measured speeds while a request is answered; placed sequences count."""

    worker_id: str
    free_tokens: int
    """Neither allocated nor reserved; negative if memory is short."""
    total_tokens: int
    sequences: int
    """Number of running and reserved sequences."""
    cached_tokens: tuple[int, int, int] = (0, 0, 0)
    """Tokens of the prompt's prefix in the worker's cache: on the device, on the host, on disk."""
    pending_tokens: float = 0
    """Prompt tokens there or reserved that are not computed, as plain tokens (`core/speeds.py`)."""
    prefill_tokens_per_s: float = 0.0
    """Prefill speed of tokens at the beginning of a sequence."""
    decode_step_s: float = 0.0
    """Measured time of a decode step; 0 if not measured."""
    preceding_share: float = 0.0
    """Extra cost of a prompt token per preceding token, as a share of its cost without any."""
    most_tokens: int = 1 << 62
    """Maximum tokens of one sequence, prompt and answer."""
    block_tokens: int = 1
    places: int = 0
    """Number of sequences that may wait there without memory for them."""


class PlacementPolicy(Protocol):
    """Chooses among workers with room for a sequence. Deterministic: the same rooms give the same choice."""

    def choose(self, size_tokens: int, rooms: Sequence[Room]) -> str:
        """Return the id of one of `rooms`, which is not empty; `size_tokens` fits in each."""
        ...


@runtime_checkable
class CostedPolicy(PlacementPolicy, Protocol):
    """A policy that can estimate the cost of each choice. It also chooses when no worker has room."""

    def costs_s(self, size_tokens: int, rooms: Sequence[Room]) -> list[float]:
        """Return the cost per room in seconds: until the prompt is computed, plus the delay to others."""
        ...


Column = npt.NDArray[np.float64]


class RoomColumns(NamedTuple):
    """Attributes of many rooms, named as in `Room`: one array each. No tokens are cached."""

    free_tokens: Column
    total_tokens: Column
    sequences: Column
    pending_tokens: Column
    prefill_tokens_per_s: Column
    decode_step_s: Column
    preceding_share: Column
    most_tokens: Column
    block_tokens: Column


@runtime_checkable
class RankingPolicy(PlacementPolicy, Protocol):
    """A policy that can rank many rooms at once, so that `choose` gets few rooms of a large fleet."""

    def ranks(self, size_tokens: int, rooms: RoomColumns) -> Column:
        """Return a number per room: `choose` prefers the lowest if no tokens are cached."""
        ...


def is_costed(policy: PlacementPolicy) -> TypeGuard[CostedPolicy]:
    """Return whether the policy's class is a `CostedPolicy`: cached, unlike `isinstance` with a protocol."""
    return issubclass(type(policy), CostedPolicy)


def is_ranking(policy: PlacementPolicy) -> TypeGuard[RankingPolicy]:
    """Return whether the policy's class is a `RankingPolicy`, as `is_costed`."""
    return issubclass(type(policy), RankingPolicy)


RequestKey = Hashable


class Action(Enum):
    """Kind of operation on a request. Within an epoch, operations take effect in this order."""

    END = 0
    GROW = 1
    ALLOCATE = 2


@dataclass(frozen=True, slots=True)
class Operation:
    """One action on one request. `blocks` is its new total, 0 for an end."""

    action: Action
    request: RequestKey
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class PackedMove:
    """Move of a running request from `source` to `target`."""

    request: RequestKey
    source: str
    target: str
    blocks: int


@dataclass(slots=True)
class PackingEffects:
    """Result of one operation or one epoch: placements, moves, and workers activated or terminated."""

    placed: dict[RequestKey, str] = field(default_factory=dict)
    """Worker of each placed arrival."""
    moves: list[PackedMove] = field(default_factory=list)
    waiting: list[RequestKey] = field(default_factory=list)
    """Arrivals for which no worker has room and none is idle. The policy forgets them."""
    displaced: list[RequestKey] = field(default_factory=list)
    """Running requests that no worker has room for: to be preempted and allocated again later."""
    activated: list[str] = field(default_factory=list)
    terminated: list[str] = field(default_factory=list)
    """Workers that became empty."""
    item_moves: int = 0
    """Number of moves, counting requests that moved together in one bundle once."""
    recomputes: int = 0
    """Number of `moves` that restart by recomputation, because the policy cannot migrate."""


class PackingPolicy(Protocol):
    """Assigns every request to a worker and moves requests to keep the packing tight. Deterministic: the same
    operations give the same effects. No worker ever exceeds its capacity."""

    @property
    def active_workers(self) -> int:
        """Number of workers that hold at least one request."""
        ...

    def add_worker(self, worker_id: str, host: str = "") -> None:
        """Add an idle worker. Raises ValueError if it is already known."""
        ...

    def remove_worker(self, worker_id: str) -> list[RequestKey]:
        """Remove a lost worker and return its requests, now forgotten. Raises KeyError."""
        ...

    def allocate(self, request: RequestKey, blocks: int) -> PackingEffects: ...

    def adopt(self, request: RequestKey, blocks: int, worker_id: str) -> PackingEffects:
        """Register a request found running, evicting others if needed. `displaced`: it cannot stay."""
        ...

    def grow(self, request: RequestKey, blocks: int) -> PackingEffects: ...

    def end(self, request: RequestKey) -> PackingEffects: ...

    def apply(self, operations: Iterable[Operation]) -> PackingEffects:
        """Apply ends, then growths, then arrivals, and return the net effects."""
        ...

    def worker_of(self, request: RequestKey) -> str | None: ...

    def check_integrity(self) -> None:
        """Raise AssertionError if the policy's state is inconsistent."""
        ...


def check_new(request: RequestKey, blocks: int, capacity_blocks: int, placed: Container[RequestKey]) -> None:
    """Raise InvalidRequest as `check_blocks`, and ValueError if the request is one of `placed`."""
    check_blocks(request, blocks, capacity_blocks)
    if request in placed:
        raise ValueError(f"request {request} is placed already")


def check_blocks(request: RequestKey, blocks: int, capacity_blocks: int) -> None:
    """Raise InvalidRequest if no worker can hold that many blocks; such a request must borrow (design §4)."""
    if not 1 <= blocks <= capacity_blocks:
        raise InvalidRequest(
            f"request {request} needs {blocks} blocks of a worker that has {capacity_blocks}; "
            "let it borrow, or refuse it",
            param="blocks",
        )
