"""`lm_head`: a Hugging Face causal language model, tuned with LoRA to predict the length of its answer.

After the prompt, the model predicts one token that names a bin of lengths (papers/003 §2.3). Prompts are
token ids, so the base model must share the served model's tokenizer. Needs `transformers` and `peft`, is
much slower than the regressor, and does not learn while serving.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from services.predictor.core import distribution
from services.predictor.core.distribution import Floats, summarize
from services.predictor.core.length_model import LengthQuery, LengthSample, ModelSettings, PredictedLength
from services.predictor.samples import write_whole
from shared.errors import ConfigError, InvalidRequest
from shared.messages.sequence import unpack_tokens

CLASSES = 32
MIN_SAMPLES = 50
_EPOCHS, _BATCH, _LEARNING_RATE = 3, 16, 2e-3
_LONGEST_TOKENS = 8192
"""Longest answer; longer ones count as this."""
_PROMPT_TOKENS = 256
"""Number of tokens read from the end of a prompt."""
_FIRST_LABEL = 16
"""First token id used for a bin: lower ids are special tokens in most vocabularies."""
_ABOUT = "lm_head.json"


def class_edges() -> Floats:
    """Return the upper edges of the length bins, geometric, [CLASSES]."""
    edges: Floats = np.ceil(np.geomspace(4.0, _LONGEST_TOKENS, CLASSES))
    return edges


class LmHeadModel:
    """A causal language model with a LoRA adapter, whose next token names a bin of lengths."""

    name = "lm_head"

    def __init__(self, model: Any, number: int) -> None:
        self._model = model.eval()
        self._number = number
        self._spread = _spread()

    @classmethod
    def from_settings(cls, settings: ModelSettings) -> "LmHeadModel":
        """Load base model and adapter. Raises ConfigError if either is missing."""
        if settings.base_model is None or settings.state_dir is None:
            raise ConfigError(
                "lm_head needs base_model and state_dir (with a trained adapter)", param="model"
            )
        try:
            about = json.loads((settings.state_dir / _ABOUT).read_text())
            base = _base(settings.base_model)
            model = PeftModel.from_pretrained(base, settings.state_dir / about["adapter"])
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"lm_head cannot be loaded: {error}; train it first "
                "(python -m services.predictor train --model lm_head)",
                param="model",
            ) from error
        return cls(model, int(about["number"]))

    @property
    def version(self) -> str:
        return f"lm_head-{self._number}"

    def predict(self, prompt: bytes, *, max_tokens: int, generated_tokens: int = 0) -> PredictedLength:
        return self.predict_batch([LengthQuery(prompt, max_tokens, generated_tokens)])[0]

    def predict_batch(self, queries: Sequence[LengthQuery]) -> list[PredictedLength]:
        """Return one prediction per query, in one forward pass."""
        if not queries:
            return []
        with torch.inference_mode():
            logits = _class_logits(self._model, [query.prompt for query in queries])
        shares = torch.softmax(logits, dim=1).double().numpy() @ self._spread
        return [
            summarize(mass, max_tokens=query.max_tokens, generated_tokens=query.generated_tokens)
            for mass, query in zip(shares, queries, strict=True)
        ]

    def observe(self, sample: LengthSample) -> None:
        """Does nothing: the model learns in `train_lm_head` only."""


def train_lm_head(
    samples: Sequence[LengthSample],
    base_model: Path,
    directory: Path,
    *,
    seed: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Train a new adapter in `directory`, which `LmHeadModel` loads; the loss is cross-entropy over the bins.

    Answers cut by their limit are left out. Raises InvalidRequest (too few samples), ConfigError (no base
    model), TimeoutError (stopped).
    """
    whole = [sample for sample in samples if not sample.censored]
    if len(whole) < MIN_SAMPLES:
        raise InvalidRequest(f"{len(whole)} whole answers; at least {MIN_SAMPLES} are needed", param="data")
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = get_peft_model(_base(base_model), LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    classes = torch.from_numpy(np.searchsorted(class_edges(), [s.output_tokens for s in whole]))
    classes = classes.clamp(max=CLASSES - 1)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=_LEARNING_RATE)
    model.train()
    for _ in range(_EPOCHS):
        order = rng.permutation(len(whole))
        for start in range(0, len(order), _BATCH):
            if should_stop():
                raise TimeoutError("training was stopped")
            rows = order[start : start + _BATCH]
            logits = _class_logits(model, [whole[row].prompt for row in rows])
            loss = torch.nn.functional.cross_entropy(logits, classes[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    _save(model, directory, len(whole))


def _base(path: Path) -> Any:
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path.name} is no causal language model: {error}", param="base_model") from error


def _save(model: Any, directory: Path, samples: int) -> None:
    """Save the adapter, then the file that points to it, so that no reader sees a partial one."""
    directory.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(path.name.split("-")[1]) for path in directory.glob("adapter-*")), default=0)
    adapter = f"adapter-{number}"
    model.save_pretrained(directory / adapter)
    about = {"number": number, "adapter": adapter, "samples": samples}
    write_whole(directory / _ABOUT, json.dumps(about).encode())


def _class_logits(model: Any, prompts: Sequence[bytes]) -> Tensor:
    """Return the logits of the bin tokens at the end of each prompt, [prompts, CLASSES]."""
    tokens = [unpack_tokens(prompt)[-_PROMPT_TOKENS:] or [0] for prompt in prompts]
    width = max(map(len, tokens))
    ids = torch.zeros(len(tokens), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, one in enumerate(tokens):
        ids[row, width - len(one) :] = torch.tensor(one)
        mask[row, width - len(one) :] = 1
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    output = model(
        input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=1, use_cache=False
    )
    logits: Tensor = output.logits[:, -1, _FIRST_LABEL : _FIRST_LABEL + CLASSES]
    return logits.float()


def _spread() -> Floats:
    """Return how each bin spreads over the finer bins, evenly in log length, [CLASSES, COUNT]."""
    knots = np.log(np.concatenate([[0.0], class_edges()]) + 0.5)
    low, high = knots[:-1, None], knots[1:, None]
    below = np.clip((np.log(distribution.UPPER + 0.5) - low) / (high - low), 0.0, 1.0)
    spread: Floats = np.diff(below, prepend=0.0, axis=1)
    return spread
