"""KV transfers of sequences that leave the worker that ran their prefill.

KV is sent layer by layer: the first layer's once it is computed, the last layer's after the step. Each
worker's link has one lane per direction; the busier of the two lanes sets the arrival time.
"""

from dataclasses import dataclass, field

from services.scheduler.policy.contract import Task
from shared.messages.sequence import SequenceKey
from sim.books import Held


@dataclass(frozen=True, slots=True)
class Wire:
    """Size of KV and speed of the links."""

    token_bytes: int = 819_200
    """KV of one token over all layers: OPT-13B in half precision."""
    layers: int = 40
    bytes_per_s: float = 25e9
    """Bandwidth of each worker's link, in each direction."""

    @property
    def tokens_per_s(self) -> float:
        return self.bytes_per_s / self.token_bytes


@dataclass(slots=True, eq=False)
class Transfer:
    """The transfer of one sequence."""

    held: Held
    task: Task
    source: int
    target: int
    arrives_s: float = 0.0
    is_due: bool = False
    """All of its prompt is sent, and an arrival event is scheduled."""


@dataclass(slots=True)
class HandoverTransfers:
    """All transfers of one fleet."""

    wire: Wire
    under_way: dict[SequenceKey, Transfer] = field(default_factory=dict)
    _gives_until_s: dict[int, float] = field(default_factory=dict)
    _takes_until_s: dict[int, float] = field(default_factory=dict)

    def promised_blocks(self, target: int, block_tokens: int) -> int:
        """Return the blocks that transfers to `target` will need."""
        if not self.under_way:
            return 0
        return sum(
            -(-(one.held.prefill_tokens + 1) // block_tokens)
            for one in self.under_way.values()
            if one.target == target
        )

    def wait_s(self, source: int, target: int, now_s: float) -> float:
        """Return the time until the links between two workers are free."""
        return max(
            0.0, self._gives_until_s.get(source, 0.0) - now_s, self._takes_until_s.get(target, 0.0) - now_s
        )

    def send(self, one: Transfer, tokens: int, begins_s: float, now_s: float) -> float:
        """Send `tokens` tokens computed from `begins_s` to now; return their arrival time."""
        wire = self.wire
        took_s = tokens * wire.token_bytes / wire.bytes_per_s
        first_layer_s = begins_s + (now_s - begins_s) / wire.layers
        gives, takes = self._gives_until_s, self._takes_until_s
        gives[one.source] = max(gives.get(one.source, 0.0), first_layer_s) + took_s
        takes[one.target] = max(takes.get(one.target, 0.0), first_layer_s) + took_s
        ends_s = max(gives[one.source], takes[one.target], now_s + took_s / wire.layers)
        one.arrives_s = max(one.arrives_s, ends_s)
        return one.arrives_s
