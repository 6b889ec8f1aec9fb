"""An engine without a model: its steps take the time that a cost model says, its tokens are a hash.

Everything else of the worker is the real one. A token depends on (seed, choice, index) alone, so an answer
that goes on elsewhere goes on as it would have. Answers end where a length drawn from the same hash says, if
the request lets them; chats' lengths are spread like that. In place of keys and values the pools hold the
tokens themselves, so that copies between tiers and workers move real bytes, and a prompt whose blocks hold
anything else is an error, as it would be wrong KV. No torch.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from services.worker.core.costs import find_cost
from services.worker.core.costs.base import CostModel, split_singles
from services.worker.core.sampling import Sampled, SamplePoint
from services.worker.engine.contract import Row
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.tiers.records import Records, records_of
from shared.blocks import fingerprint
from shared.errors import ConfigError, InternalError
from shared.messages.sequence import Sampling
from shared.messages.tokens import TokenLogprobs
from shared.model_files import source_of

if TYPE_CHECKING:
    from services.worker.engine.settings import SimulatedConfig
    from services.worker.kv.tiers.records import LayerPools

_FIRST_TEXT_TOKEN = 16
"""Lower ids are often special ones, which a gateway shows as nothing."""
_MEDIAN_ANSWER_TOKENS, _ANSWER_SPREAD = 128, 0.8
"""Of a log-normal distribution, about that of chats: a mean of 176, one in a hundred beyond 800."""
_PROFILED_TOKENS = 128


class SimulatedEngine:
    """See above. `sleep` lets the time of a step pass, in seconds that are `speed` times as short."""

    def __init__(
        self,
        *,
        vocabulary: int,
        max_positions: int,
        kv_blocks: int,
        block_tokens: int,
        cost: CostModel,
        speed: float = 1.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.vocabulary, self.max_positions = vocabulary, max_positions
        self.kv_blocks, self.block_tokens = kv_blocks, block_tokens
        self.weights = blake2b(f"simulated {vocabulary}".encode(), digest_size=16).hexdigest()
        self.fingerprint = fingerprint(
            model=self.weights, dtype="int32", layout="tokens", block_tokens=block_tokens
        )
        profiled_s = cost.step_s([(0, _PROFILED_TOKENS)], decodes=0, context_tokens=0)
        self.prefill_tokens_per_s = speed * _PROFILED_TOKENS / profiled_s
        self._cost, self._speed, self._sleep = cost, speed, sleep
        self._tokens = np.zeros((kv_blocks, block_tokens), dtype=np.int32)

    @classmethod
    def of(
        cls, model: str, kv_blocks: int, block_tokens: int, config: "SimulatedConfig"
    ) -> "SimulatedEngine":
        """With the vocabulary and the longest context of the model in folder `model`. Raises ConfigError."""
        folder = source_of(model)
        if not isinstance(folder, Path):
            raise ConfigError(
                f"a simulated engine reads config.json, and {model!r} is no folder: name one", param="model"
            )
        found = json.loads((folder / "config.json").read_bytes())
        try:
            vocabulary, max_positions = found["vocab_size"], found["max_position_embeddings"]
        except KeyError as missing:
            raise ConfigError(f"{folder}/config.json has no {missing}", param="model") from missing
        return cls(
            vocabulary=vocabulary,
            max_positions=max_positions,
            kv_blocks=kv_blocks,
            block_tokens=block_tokens,
            cost=find_cost(config.cost),
            speed=config.speed,
        )

    @property
    def pools(self) -> "LayerPools":
        """One layer: the tokens `[kv_blocks, block_tokens]`."""
        return [(self._tokens,)]

    def records(self) -> Records:
        """Its blocks as rows of bytes, for one thread."""
        return records_of(self.pools)

    def make_pool(self) -> BlockPool:
        """A pool of its blocks."""
        return BlockPool(self.kv_blocks, self.block_tokens)

    def step(self, rows: Sequence[Row]) -> list[Sampled | None]:
        """See `Engine`. Raises InternalError for a row whose blocks do not hold its beginning."""
        for row in rows:
            self._write(row)
        parts = [(row.first_position, row.first_position + len(row.tokens)) for row in rows]
        took_s = self._cost.step_s(*split_singles(parts))
        self._sleep(took_s / self._speed)
        return [None if row.point is None else self._sampled(row.point) for row in rows]

    def _write(self, row: Row) -> None:
        """The row's tokens to their places. Before an answer begins, all that precedes it has to be there."""
        if not _is_chunk(row):
            block, offset = divmod(row.first_position, self.block_tokens)
            self._tokens[row.blocks[block], offset] = row.tokens[0]
            return
        end = row.first_position + len(row.tokens)
        table = np.asarray(row.blocks[: -(-end // self.block_tokens)], dtype=np.int64)
        places = np.arange(row.first_position, end)
        self._tokens[table[places // self.block_tokens], places % self.block_tokens] = row.tokens
        if row.point is not None and len(row.point.tokens) >= end:
            held: npt.NDArray[np.int32] = self._tokens[table].reshape(-1)[:end]
            if not np.array_equal(held, np.asarray(row.point.tokens[:end], dtype=np.int32)):
                raise InternalError("blocks hold the KV of other tokens than the sequence's")

    def _sampled(self, point: SamplePoint) -> Sampled:
        sampling = point.sampling
        forced = point.forced
        token = token_at(sampling, point.choice, point.index, self.vocabulary) if forced is None else forced
        if sampling.top_logprobs is None:
            return Sampled(token)
        return Sampled(token, TokenLogprobs(chosen=0.0, top=((token, 0.0),) if sampling.top_logprobs else ()))


def token_at(sampling: Sampling, choice: int, index: int, vocabulary: int) -> int:
    """The token at `index` of an answer: text, or one that ends it where its length is reached."""
    is_last = index + 1 >= answer_tokens(sampling.seed, choice)
    if sampling.end_token_ids and is_last and index >= sampling.min_tokens:
        return sampling.end_token_ids[0]
    first = min(_FIRST_TEXT_TOKEN, vocabulary // 2)
    token = first + _hash(sampling.seed, choice, index) % (vocabulary - first)
    for _ in sampling.end_token_ids:  # the next that is none of them
        if token not in sampling.end_token_ids:
            break
        token = first + (token + 1 - first) % (vocabulary - first)
    return token


def answer_tokens(seed: int, choice: int) -> int:
    """Length of an answer that may end by itself, its end included."""
    uniform = (_hash(seed, choice, -1) + 0.5) / 2**64
    return max(1, round(_MEDIAN_ANSWER_TOKENS * math.exp(_ANSWER_SPREAD * NormalDist().inv_cdf(uniform))))


def _hash(seed: int, choice: int, index: int) -> int:
    """64 bits."""
    digest = blake2b(f"{seed} {choice} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _is_chunk(row: Row) -> bool:
    """A part of a prompt; else one token of an answer."""
    return len(row.tokens) > 1 or row.point is None or row.point.index == -row.point.sampling.forced_tokens
