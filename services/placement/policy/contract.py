"""What a packing policy is told and answers: where sequences go, and which of them move.

Placement by packing keeps books of its own: it hears of every arrival, growth and end, and returns effects.
Sizes are blocks of one size on all workers: what the scheduler has allocated. How a move is done (KV or
tokens) is left open; it is decided over all moves of an epoch.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, runtime_checkable

from shared.errors import InvalidRequest


@dataclass(frozen=True)
class Room:
    """What one worker offers at the moment of a decision."""

    worker_id: str
    free_tokens: int
    """Unallocated and not spoken for."""
    total_tokens: int
    sequences: int
    """Live or on their way there."""
    cached_tokens: tuple[int, int, int] = (0, 0, 0)
    """Of the prompt's beginning, in its prefix cache: on the device, on the host, on disk."""
    pending_tokens: int = 0
    """Of prompts that are there or on their way, and not computed; plain ones (`core/speeds.py`)."""
    prefill_tokens_per_s: float = 0.0
    """Of tokens that nothing precedes."""
    decode_step_s: float = 0.0
    """As it measured them; 0: it has not."""
    preceding_share: float = 0.0
    """What each token before it adds to one of a prompt, as a share of what it costs without any."""


class PlacementPolicy(Protocol):
    """Chooses among workers that have room for a sequence. Deterministic: the same rooms, the same choice."""

    def choose(self, size_tokens: int, rooms: Sequence[Room]) -> str:
        """The worker for a sequence of `size_tokens`, one of `rooms`: not empty, all fit."""
        ...


@runtime_checkable
class CostedPolicy(PlacementPolicy, Protocol):
    """One that can say what each choice would cost; then it also chooses where nobody has room."""

    def costs_s(self, size_tokens: int, rooms: Sequence[Room]) -> list[float]:
        """In seconds, until the prompt is computed there and what that keeps others from; one for each."""
        ...


RequestKey = Hashable


class Action(Enum):
    """What may happen to a request. Within an epoch actions take effect in this order."""

    END = 0
    GROW = 1
    ALLOCATE = 2


@dataclass(frozen=True, slots=True)
class Operation:
    """One action on one request. `blocks` is its new total; an end has none."""

    action: Action
    request: RequestKey
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class PackedMove:
    """A request that runs on `source` is to go on running on `target`."""

    request: RequestKey
    source: str
    target: str
    blocks: int


@dataclass(slots=True)
class PackingEffects:
    """What an operation, or an epoch of them, has changed: who goes where, and which workers begin or end."""

    placed: dict[RequestKey, str] = field(default_factory=dict)
    """Arrivals, and the worker of each."""
    moves: list[PackedMove] = field(default_factory=list)
    waiting: list[RequestKey] = field(default_factory=list)
    """Arrivals without a place: no worker has room and none can be started. They are not kept here."""
    displaced: list[RequestKey] = field(default_factory=list)
    """Ran, outgrew their worker, and no other has room: to be preempted, and allocated again later."""
    activated: list[str] = field(default_factory=list)
    terminated: list[str] = field(default_factory=list)
    """Workers that serve nothing any more."""
    item_moves: int = 0
    """`moves`, but requests that moved together as one bundle count once."""
    recomputes: int = 0
    """Of `moves`, those that cannot be migrations, as the policy has none: they start again elsewhere."""


class PackingPolicy(Protocol):
    """Says on which worker every request is to be, and moves requests to keep it so.

    Deterministic: the same operations give the same effects. No worker is ever over its capacity.
    """

    @property
    def active_workers(self) -> int:
        """That hold at least one request."""
        ...

    def add_worker(self, worker_id: str, host: str = "", switch: str = "") -> None:
        """One more that can be activated, and where it stands. Raises ValueError for one that is known."""
        ...

    def remove_worker(self, worker_id: str) -> list[RequestKey]:
        """It is gone, and with it its requests, which are returned. Raises KeyError."""
        ...

    def allocate(self, request: RequestKey, blocks: int) -> PackingEffects: ...

    def adopt(self, request: RequestKey, blocks: int, worker_id: str) -> PackingEffects:
        """It runs there already and stays, if need be at the expense of others; displaced: it cannot be."""
        ...

    def grow(self, request: RequestKey, blocks: int) -> PackingEffects: ...

    def end(self, request: RequestKey) -> PackingEffects: ...

    def apply(self, operations: Iterable[Operation]) -> PackingEffects:
        """An epoch: ends, then growths, then arrivals, and the net moves of all."""
        ...

    def worker_of(self, request: RequestKey) -> str | None: ...

    def check_integrity(self) -> None:
        """Raises AssertionError when the books contradict themselves."""
        ...


def check_blocks(request: RequestKey, blocks: int, capacity_blocks: int) -> None:
    """Raises InvalidRequest for a size that no worker can hold: such a request has to borrow (design §4)."""
    if not 1 <= blocks <= capacity_blocks:
        raise InvalidRequest(
            f"request {request} needs {blocks} blocks of a worker that has {capacity_blocks}; "
            "let it borrow, or refuse it",
            param="blocks",
        )
