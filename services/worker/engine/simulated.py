"""An engine without a model: its steps take the time that a cost model says, its tokens are a hash.

Everything else of the worker is the real one. A token depends on (seed, choice, index) alone, so an answer
that goes on elsewhere goes on as it would have. Answers end where a length drawn from the same hash says, if
the request lets them; chats' lengths are spread like that. In place of keys and values the pools hold the
tokens themselves, so that copies between tiers and workers move real bytes, and a prompt whose blocks hold
anything else is an error, as it would be wrong KV. Where other workers hold some of the blocks they say at
every step what they see there (`peers/attention/tokens.py`). No torch.
"""

import json
import math
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from services.worker.core.costs import find_cost
from services.worker.core.costs.base import CostModel, split_singles
from services.worker.core.costs.fitted import RemoteCost
from services.worker.core.sampling import Sampled, SamplePoint
from services.worker.engine.contract import RemoteTokens, Row
from services.worker.engine.partition import Homes, Part, split
from services.worker.engine.spans import PackedSpans, Span, pack
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.tiers.records import Records, records_of
from shared.average import averaged
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
_WEIGHT = 0.1
"""Of the newest step."""


class SimulatedEngine:
    """See above. `sleep` lets the time of a step pass, in seconds that are `speed` times as short. Other
    workers may hold blocks where `remote_cost` says what that takes."""

    def __init__(
        self,
        *,
        vocabulary: int,
        max_positions: int,
        kv_blocks: int,
        block_tokens: int,
        cost: CostModel,
        remote_cost: RemoteCost | None = None,
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
        self.tokens = np.zeros((kv_blocks, block_tokens), dtype=np.int32)
        self._elsewhere: tuple[Homes, RemoteTokens] | None = None
        self._remote_cost = remote_cost
        self.remote_block_s = self.remote_total_s = 0.0
        """See `SharingEngine`."""
        self._served_s = 0.0
        """For others, since the last step."""
        self._serving = threading.Lock()

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
        cost = find_cost(config.cost)
        return cls(
            vocabulary=vocabulary,
            max_positions=max_positions,
            kv_blocks=kv_blocks,
            block_tokens=block_tokens,
            cost=cost,
            remote_cost=RemoteCost(cost),
            speed=config.speed,
        )

    @property
    def pools(self) -> "LayerPools":
        """One layer: the tokens `[kv_blocks, block_tokens]`."""
        return [(self.tokens,)]

    def records(self) -> Records:
        """Its blocks as rows of bytes, for one thread."""
        return records_of(self.pools)

    @property
    def device_type(self) -> str:
        """As where everything is in the machine's memory."""
        return "cpu"

    @property
    def own_ids(self) -> int:
        """Blocks of this engine have lower ids."""
        return self.kv_blocks

    @property
    def is_divisible(self) -> bool:
        return self._remote_cost is not None

    def extend(self, homes: Homes, remote: RemoteTokens) -> None:
        """See `TokenEngine`."""
        self._elsewhere = homes, remote

    def serve(self, seen_tokens: int, *, is_busy: bool) -> float:
        """See `TokenEngine`."""
        assert self._remote_cost is not None
        served_s = self._remote_cost.serving_s(seen_tokens)
        if is_busy:
            with self._serving:
                self._served_s += served_s
        return served_s / self._speed

    def make_pool(self) -> BlockPool:
        """A pool of its blocks."""
        return BlockPool(self.kv_blocks, self.block_tokens)

    def step(self, rows: Sequence[Row]) -> list[Sampled | None]:
        """See `Engine`. Raises InternalError for a row whose blocks do not hold its beginning, and
        CreditorLost."""
        divided = self._divided(rows)
        for row in rows:
            self._write(row)
        chunks, decodes, context_tokens = split_singles(
            [(row.first_position, row.first_position + len(row.tokens)) for row in rows]
        )
        if divided is None:
            took_s = self._cost.step_s(chunks, decodes, context_tokens)
        else:
            took_s = self._divided_s(divided, chunks, decodes, context_tokens)
        with self._serving:
            served_s, self._served_s = self._served_s, 0.0
        self._sleep((took_s + served_s) / self._speed)
        return [None if row.point is None else self._sampled(row.point) for row in rows]

    def _write(self, row: Row) -> None:
        """The row's tokens to their places. Before an answer begins, and whenever it fills a block, all that
        precedes has to be there. What lies elsewhere is none of this."""
        end = row.first_position + len(row.tokens)
        if _is_chunk(row):
            table = np.asarray(row.blocks[: -(-end // self.block_tokens)], dtype=np.int64)
            places = np.arange(row.first_position, end)
            blocks = table[places // self.block_tokens]
            is_own = blocks < self.kv_blocks
            written = np.asarray(row.tokens, dtype=np.int32)[is_own]
            self.tokens[blocks[is_own], places[is_own] % self.block_tokens] = written
        else:
            block, offset = divmod(row.first_position, self.block_tokens)
            if row.blocks[block] < self.kv_blocks:
                self.tokens[row.blocks[block], offset] = row.tokens[0]
            if end % self.block_tokens:
                return
        if row.point is not None and len(row.point.tokens) >= end:
            self._check_own(row.blocks, row.point.tokens[:end])

    def _check_own(self, blocks: Sequence[int], tokens: Sequence[int]) -> None:
        """Raises InternalError where they do not hold these."""
        table = np.asarray(blocks[: -(-len(tokens) // self.block_tokens)], dtype=np.int64)
        is_own = table < self.kv_blocks
        held = self.tokens[table[is_own]].reshape(-1)
        due = np.asarray(tokens, dtype=np.int32)[np.repeat(is_own, self.block_tokens)[: len(tokens)]]
        if not np.array_equal(held[: len(due)], due):
            raise InternalError("blocks hold the KV of other tokens than the sequence's")

    def _divided(self, rows: Sequence[Row]) -> "_Divided | None":
        """The creditors' share of a step, done. None where all blocks are own. Raises CreditorLost, and
        InternalError where a creditor sees other tokens than a sequence's."""
        if self._elsewhere is None or self._elsewhere[0].is_empty:
            return None
        homes, remote = self._elsewhere
        away = [row for row in rows if max(row.blocks) >= self.kv_blocks]
        if not away:
            return None
        packed = pack(
            [Span(row.first_position, len(row.tokens), row.blocks) for row in away], self.block_tokens
        )
        parts = split(packed, homes, self.block_tokens)[1:]
        if not parts:
            return None
        seen = remote.attend(parts, np.concatenate([np.asarray(row.tokens, dtype=np.int32) for row in away]))
        divided = _Divided()
        found: dict[tuple[int, int], int] = {}
        for part, each in zip(parts, seen, strict=True):
            row_of = np.searchsorted(packed.first_row, part.rows[part.spans.first_row[:-1]], side="right") - 1
            found.update(
                zip(((part.holder, row) for row in row_of.tolist()), each.sums.tolist(), strict=True)
            )
            divided.add(part, is_copied=each.is_copied, copied_tokens=part.seen_keys * self.block_tokens)
        for index, row in enumerate(away):
            self._check(row, homes, {holder: sum_ for (holder, at), sum_ in found.items() if at == index})
            divided.see(row, homes, self.block_tokens)
        return divided

    def _check(self, row: Row, homes: Homes, found: dict[int, int]) -> None:
        """What creditors saw of a row whose tokens are all known."""
        end = row.first_position + len(row.tokens)
        if row.point is None or len(row.point.tokens) < end:
            return
        holders, _ = homes.locate(row.blocks[: -(-end // self.block_tokens)])
        known = np.asarray(row.point.tokens[:end], dtype=np.int32)
        of_token = np.repeat(holders, self.block_tokens)[:end]
        for holder, sum_ in found.items():
            if zlib.crc32(known[of_token == holder].tobytes()) != sum_:
                raise InternalError("a creditor holds the KV of other tokens than the sequence's")

    def _divided_s(
        self, divided: "_Divided", chunks: Sequence[tuple[int, int]], decodes: int, context_tokens: int
    ) -> float:
        """Seconds of the step; counts those that its creditors cost."""
        assert self._remote_cost is not None
        local_tokens = context_tokens - sum(divided.remote_tokens.values())
        took_s = self._remote_cost.step_s(chunks, decodes, local_tokens, divided.remote_tokens.values())
        took_s += self._remote_cost.copy_s(divided.copied_tokens)
        waited_s = (took_s - self._cost.step_s(chunks, decodes, local_tokens)) / self._speed
        self.remote_total_s += waited_s
        if not chunks and divided.blocks:
            self.remote_block_s = averaged(self.remote_block_s or None, waited_s / divided.blocks, _WEIGHT)
        return took_s

    def _sampled(self, point: SamplePoint) -> Sampled:
        sampling = point.sampling
        forced = point.forced
        token = token_at(sampling, point.choice, point.index, self.vocabulary) if forced is None else forced
        if sampling.top_logprobs is None:
            return Sampled(token)
        return Sampled(token, TokenLogprobs(chosen=0.0, top=((token, 0.0),) if sampling.top_logprobs else ()))


@dataclass(slots=True)
class _Divided:
    """A step of which other workers hold blocks."""

    remote_tokens: dict[int, int] = field(default_factory=dict)
    """By creditor that computes: of decodes' contexts, those that it holds."""
    copied_tokens: int = 0
    blocks: int = 0
    """In use elsewhere."""

    def add(self, part: Part, *, is_copied: bool, copied_tokens: int) -> None:
        self.blocks += part.seen_keys
        if is_copied:
            self.copied_tokens += copied_tokens
        else:
            self.remote_tokens[part.holder] = 0

    def see(self, row: Row, homes: Homes, block_tokens: int) -> None:
        """The row's context, where it decodes."""
        if len(row.tokens) > 1:
            return
        end = row.first_position + 1
        holders, _ = homes.locate(row.blocks[: -(-end // block_tokens)])
        for holder, tokens in enumerate(np.bincount(np.repeat(holders, block_tokens)[:end]).tolist()):
            if holder in self.remote_tokens:
                self.remote_tokens[holder] += tokens


def token_sums(tokens: npt.NDArray[np.int32], spans: PackedSpans) -> npt.NDArray[np.uint32]:
    """`SeenTokens.sums` of a part whose blocks are rows of `tokens` `[blocks, block_tokens]`."""
    found = np.zeros(len(spans.key_end), dtype=np.uint32)
    for index, (start, end) in enumerate(
        zip(spans.table_start.tolist(), spans.key_end.tolist(), strict=True)
    ):
        table = spans.blocks[start : start - (-end // tokens.shape[1])]
        found[index] = zlib.crc32(tokens[table].reshape(-1)[:end].tobytes())
    return found


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
