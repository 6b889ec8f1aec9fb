"""Sequences as the scheduler's core keeps them."""

from services.scheduler.core.sequence import Sequence
from tests.shared.messages.builders import ref, spec


def sequence(
    name: str = "a",
    arrival_s: float = 0.0,
    *,
    attempt: int = 1,
    generated: int = 0,
    max_tokens: int = 20,
    gateway_id: str = "gateway-0",
) -> Sequence:
    """Of four tokens in the prompt."""
    submitted = spec(
        ref(name, attempt), [7] * 4, generated=[1] * generated, max_tokens=max_tokens, gateway_id=gateway_id
    )
    return Sequence.from_spec(submitted, arrival_s)
