"""`oracle`: the true length, from a trace, for experiments on the value of perfect prediction.

A trace is JSONL as in `samples.py`; prompts are looked up by token ids. It also remembers finished answers,
so a first pass over a workload with a greedy model teaches the second. Several lengths of one prompt are
returned in turn. For an unknown prompt the histogram answers. Source: papers/003 §4 (Oracle).
"""

from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

from services.predictor.core.distribution import HistogramModel
from services.predictor.core.length_model import LengthSample, ModelSettings, PredictedLength
from services.predictor.samples import load_tokenizer, read_samples

_MOST_PROMPTS = 200_000


class OracleModel:
    """True lengths by prompt, for up to 200,000 prompts; the least recently seen are dropped first."""

    name = "oracle"

    def __init__(self, samples: Iterable[LengthSample] = ()) -> None:
        self._lengths_tokens: OrderedDict[bytes, list[int]] = OrderedDict()
        self._asked: dict[bytes, int] = {}
        self._histogram = HistogramModel()
        self._updates = 0
        for sample in samples:
            self._remember(sample, is_first_pass=True)

    @classmethod
    def from_settings(cls, settings: ModelSettings) -> "OracleModel":
        """Load the trace. Raises ConfigError or InvalidRequest if it cannot be read."""
        if settings.trace is None:
            return cls()
        tokenizer = None if settings.tokenizer is None else load_tokenizer(settings.tokenizer)
        return cls(read_samples(settings.trace, tokenizer))

    @property
    def version(self) -> str:
        return f"oracle-{self._updates}"

    def predict(self, prompt: bytes, *, max_tokens: int, generated_tokens: int = 0) -> PredictedLength:
        key = _key(prompt)
        lengths = self._lengths_tokens.get(key)
        if not lengths:
            return self._histogram.predict(prompt, max_tokens=max_tokens, generated_tokens=generated_tokens)
        if generated_tokens == 0 and len(lengths) > 1:
            self._asked[key] = self._asked.get(key, -1) + 1
        length = lengths[self._asked.get(key, 0) % len(lengths)]
        length = min(max(length, generated_tokens + 1), max_tokens)
        return PredictedLength(length, length, length, length, length)

    def observe(self, sample: LengthSample) -> None:
        self._histogram.observe(sample)
        self._remember(sample, is_first_pass=False)

    def _remember(self, sample: LengthSample, *, is_first_pass: bool) -> None:
        """Remember a length. A trace may repeat a prompt; while serving, the last answer replaces others."""
        if sample.censored:
            return
        key = _key(sample.prompt)
        self._updates += 1
        if is_first_pass:
            self._lengths_tokens.setdefault(key, []).append(sample.output_tokens)
        elif len(self._lengths_tokens.get(key, ())) <= 1:
            self._lengths_tokens[key] = [sample.output_tokens]
        self._lengths_tokens.move_to_end(key)
        while len(self._lengths_tokens) > _MOST_PROMPTS:
            gone, _ = self._lengths_tokens.popitem(last=False)
            self._asked.pop(gone, None)


def _key(prompt: bytes) -> bytes:
    return blake2b(prompt, digest_size=16).digest()
