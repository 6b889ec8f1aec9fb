"""A request as the simulator knows it: what a trace says, true answer length included.

No policy ever sees `output_tokens`, except through the oracle predictor.
"""

from dataclasses import dataclass

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
    """What a model said of it, as the trace has it (tokens, or a class of lengths): for `learned`."""
    tenant: Tenant = NOBODY
    names: tuple[BlockHash, ...] = ()
    """Of its prompt's whole blocks, where the trace has them: what begins alike is called alike."""

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or not 1 <= self.output_tokens <= self.max_tokens:
            raise ValueError(
                f"request {self.index}: prompt of {self.prompt_tokens} tokens, answer of "
                f"{self.output_tokens}, limit {self.max_tokens}; write prompt >= 1 and 1 <= answer <= limit"
            )

    @property
    def key(self) -> SequenceKey:
        return (f"{self.index:08d}", 0)


@dataclass(slots=True)
class ServedRecord:
    """What became of one request. Times in seconds; the five parts sum to `end_s - arrival_s`."""

    request: SimRequest
    worker: int = 0
    first_token_s: float = -1.0
    end_s: float = -1.0
    first_late_s: float = 0.0
    end_late_s: float = 0.0
    """So long after that its client has the first token, and the last, where cores are shared."""
    queue_s: float = 0.0
    """Arrival to the first chunk of its prompt."""
    prefill_s: float = 0.0
    """First chunk to the end of its first prefill, waits between chunks included."""
    gt_wait_s: float = 0.0
    """Between the end of its prefill and its first decode."""
    decode_s: float = 0.0
    preempted_s: float = 0.0
    """Later waits, and prefills after an eviction."""
    cached_tokens: int = 0
    """Of its prompt, found when it began."""
    expected_tokens: int = 0
    """The same, when its worker was chosen."""
    evictions: int = 0
    """Its KV was given up, to be computed again."""
    handovers: int = 0
    """It went on at another worker, with its KV."""
    pauses: int = 0
    """Its decoding was interrupted while its KV stayed."""

    @property
    def jct_s(self) -> float:
        """Job completion time: arrival to end."""
        return self.end_s - self.request.arrival_s

    @property
    def normalized_s(self) -> float:
        """Latency per answer token."""
        return self.jct_s / self.request.output_tokens
