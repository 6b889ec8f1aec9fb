"""A simulated request with its true answer length.

Only the oracle predictor may show `output_tokens` to a policy.
"""

from dataclasses import dataclass, field

from shared.blocks import BlockHash
from shared.messages.sequence import NOBODY, SequenceKey, Tenant


@dataclass(frozen=True, slots=True)
class SimRequest:
    """`output_tokens` counts the end token; `max_tokens` is the limit that policies see."""

    index: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    predicted_tokens: int | None = None
    """Prediction in the trace (tokens, or a class of lengths), used by the `learned` predictor."""
    tenant: Tenant = NOBODY
    names: tuple[BlockHash, ...] = ()
    """Names of the prompt's whole blocks, if the trace has them; equal prefixes have equal names."""
    key: SequenceKey = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or not 1 <= self.output_tokens <= self.max_tokens:
            raise ValueError(
                f"request {self.index}: prompt of {self.prompt_tokens} tokens, answer of "
                f"{self.output_tokens}, limit {self.max_tokens}; write prompt >= 1 and 1 <= answer <= limit"
            )
        object.__setattr__(self, "key", (f"{self.index:08d}", 0))


@dataclass(slots=True)
class ServedRecord:
    """Result of one request. Times in seconds; the five parts sum to `end_s - arrival_s`."""

    request: SimRequest
    worker: int = 0
    first_token_s: float = -1.0
    end_s: float = -1.0
    first_late_s: float = 0.0
    end_late_s: float = 0.0
    """Delay until the client has the first and the last token, if workers share cores."""
    queue_s: float = 0.0
    """Arrival to the first prefill chunk."""
    prefill_s: float = 0.0
    """First chunk to the end of the first prefill, waits between chunks included."""
    gt_wait_s: float = 0.0
    """End of the prefill to the first decode."""
    decode_s: float = 0.0
    preempted_s: float = 0.0
    """Later waits, and prefills after an eviction."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when the request began."""
    expected_tokens: int = 0
    """The same, as expected when its worker was chosen."""
    evictions: int = 0
    """Times its KV was evicted, to be computed again."""
    handovers: int = 0
    """Times it moved to another worker with its KV."""
    pauses: int = 0
    """Times its decoding was interrupted while its KV stayed."""

    @property
    def jct_s(self) -> float:
        """Job completion time: arrival to end."""
        return self.end_s - self.request.arrival_s

    @property
    def normalized_s(self) -> float:
        """Latency per answer token."""
        return self.jct_s / self.request.output_tokens
