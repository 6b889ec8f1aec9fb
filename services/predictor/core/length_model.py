"""What every length model can do. Source: papers/003 (EcoServe) §2.3; `algorithms.md` §2.

A length is the number of tokens of a whole answer, the end token included. An answer cut by its limit says
only that the true length is larger: it is a *censored* sample, and a model that took it for a length would
learn its own caps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class LengthSample:
    """One finished answer, to learn from or to be judged by."""

    prompt: bytes
    """Token ids, packed (`shared.messages.sequence.pack_tokens`)."""
    output_tokens: int
    censored: bool
    """Cut by its limit: the true length is above `output_tokens`."""


@dataclass(frozen=True)
class LengthQuery:
    """How long will the answer to `prompt` be, which is longer than `generated_tokens` already?"""

    prompt: bytes
    max_tokens: int
    generated_tokens: int = 0


@dataclass(frozen=True)
class PredictedLength:
    """What a model says of an answer: its whole length in tokens, each value in (generated, max_tokens]."""

    rl_tokens: int
    """Expected length; given g > 0 generated tokens, g + E[RL − g | RL > g], rounded up."""
    p50_tokens: int
    p80_tokens: int
    p90_tokens: int
    p95_tokens: int


class LengthModel(Protocol):
    """Predicts answer lengths and learns from finished answers."""

    name: str

    @property
    def version(self) -> str:
        """Changes with every update, so that a prediction can be traced to what the model knew."""
        ...

    def predict(self, prompt: bytes, *, max_tokens: int, generated_tokens: int = 0) -> PredictedLength:
        """The length of the answer to `prompt`, which is known to be longer than `generated_tokens`."""
        ...

    def observe(self, sample: LengthSample) -> None:
        """Learns from one finished answer."""
        ...


@runtime_checkable
class BatchModel(LengthModel, Protocol):
    """A model for which many questions cost little more than one."""

    def predict_batch(self, queries: Sequence[LengthQuery]) -> list[PredictedLength]:
        """One answer for each, in order."""
        ...


@dataclass(frozen=True)
class ModelSettings:
    """What a model may need when it is made; each takes what it knows."""

    state_dir: Path | None = None
    """Where trained versions are kept; None: nothing survives."""
    trace: Path | None = None
    """`oracle`: JSONL of prompts and true lengths."""
    tokenizer: Path | None = None
    """`tokenizer.json` of the model that is served: to read prompts given as text."""
    base_model: Path | None = None
    """`lm_head`: directory of a Hugging Face causal language model."""


ModelFactory = Callable[[ModelSettings], LengthModel]


def predict_all(model: LengthModel, queries: Sequence[LengthQuery]) -> list[PredictedLength]:
    """In one call where the model can, else one by one."""
    if isinstance(model, BatchModel):
        return model.predict_batch(queries)
    return [
        model.predict(query.prompt, max_tokens=query.max_tokens, generated_tokens=query.generated_tokens)
        for query in queries
    ]
