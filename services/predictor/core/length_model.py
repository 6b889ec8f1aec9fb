"""Interface of length models. Source: papers/003 (EcoServe) §2.3; `algorithms.md` §2.

A length is the number of tokens of a complete answer, including the end token. An answer cut by its limit is
a *censored* sample: its true length is larger. A model that took it for a length would learn its own limits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class LengthSample:
    """One finished answer, for training or evaluation."""

    prompt: bytes
    """Packed token ids (`shared.messages.sequence.pack_tokens`)."""
    output_tokens: int
    censored: bool
    """Whether it was cut by its limit: the true length is above `output_tokens`."""


@dataclass(frozen=True)
class LengthQuery:
    """A request for the length of the answer to `prompt`, known to exceed `generated_tokens`."""

    prompt: bytes
    max_tokens: int
    generated_tokens: int = 0


@dataclass(frozen=True)
class PredictedLength:
    """Prediction of an answer's whole length in tokens, each value in (generated, max_tokens]."""

    rl_tokens: int
    """Expected length, rounded up: g + E[RL − g | RL > g] for g generated tokens."""
    p50_tokens: int
    p80_tokens: int
    p90_tokens: int
    p95_tokens: int


class LengthModel(Protocol):
    """Predicts answer lengths and learns from finished answers."""

    name: str

    @property
    def version(self) -> str:
        """Version that changes with every update, to trace a prediction to the model's state."""
        ...

    def predict(self, prompt: bytes, *, max_tokens: int, generated_tokens: int = 0) -> PredictedLength:
        """Return the length of the answer to `prompt`, known to exceed `generated_tokens`."""
        ...

    def observe(self, sample: LengthSample) -> None:
        """Learn from one finished answer."""
        ...


@runtime_checkable
class BatchModel(LengthModel, Protocol):
    """A length model that predicts many queries at little more than the cost of one."""

    def predict_batch(self, queries: Sequence[LengthQuery]) -> list[PredictedLength]:
        """Return one prediction per query, in order."""
        ...


@dataclass(frozen=True)
class ModelSettings:
    """Inputs for creating a model; each model uses what it needs."""

    state_dir: Path | None = None
    """Directory of trained versions; None: nothing is saved."""
    trace: Path | None = None
    """`oracle`: JSONL of prompts and true lengths."""
    tokenizer: Path | None = None
    """`tokenizer.json` of the served model, to read prompts given as text."""
    base_model: Path | None = None
    """`lm_head`: directory of a Hugging Face causal language model."""


ModelFactory = Callable[[ModelSettings], LengthModel]
