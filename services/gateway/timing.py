"""How long a stream waits for what. Pure data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StreamTiming:
    """How long a stream waits for what, in seconds of the shell's clock."""

    frame_timeout_s: float = 3.0
    """No sign of life for this long: audit by submitting again under the same attempt."""
    fetch_grace_s: float = 0.25
    """A heartbeat may overtake the frames it counts by this much."""
    retry_s: float = 0.2
    """Between tries of a submission or fetch that failed."""
    give_up_s: float = 60.0
    """No sign of life from anyone for this long: the stream fails."""
    max_internal_errors: int = 3
    """Of the scheduler, or of the engines that tried it."""
    max_kv_losses: int = 5
    """Of KV that other workers lent, in a row without a new token."""
