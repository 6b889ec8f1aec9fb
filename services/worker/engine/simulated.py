"""Engine without a model: a cost model sets its step times, and its tokens are hashes. Needs no torch.

A token depends on (seed, choice, index) only, and answers are as long as chats'. Blocks hold token ids
instead of KV: copies move real bytes, and wrong block contents raise an error, also at creditors
(`peers/attention/tokens.py`)."""

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

from services.worker.core.costs import CostModel, find_cost, split_singles
from services.worker.core.costs.fitted import RemoteCost
from services.worker.core.sampling import Sampled, SamplePoint
from services.worker.engine.contract import RemoteMeter, RemoteTokens, Row, StepRows, StepTicket
from services.worker.engine.partition import Homes, split
from services.worker.engine.spans import PackedSpans, Span, pack
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.tiers.records import Records, records_of
from shared.blocks import fingerprint
from shared.errors import ConfigError, InternalError
from shared.messages.sequence import Sampling
from shared.messages.tokens import TokenLogprobs
from shared.model_files import source_of

if TYPE_CHECKING:
    from services.worker.core.settings import SimulatedConfig
    from services.worker.kv.tiers.records import LayerPools

_FIRST_TEXT_TOKEN = 16
"""First id used for text; lower ids are often special tokens without text."""
_MEDIAN_ANSWER_TOKENS, _ANSWER_SPREAD = 128, 0.8
"""Median and sigma of the log-normal answer lengths: mean 176, 99th percentile 800, about as in chats."""
_PROFILED_TOKENS = 128


class SimulatedEngine:
    """Implements `TokenEngine`. Each step calls `sleep` with its cost in seconds divided by `speed`.

    Other workers may hold blocks if `remote_cost` is given."""

    carries = (0, 0)

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
        self.own_ids, self.device_type = kv_blocks, "cpu"
        self.remote, self._remote_cost = RemoteMeter(), remote_cost
        self.is_divisible = remote_cost is not None
        self._elsewhere: tuple[Homes, RemoteTokens] | None = None
        self._served_s = 0.0
        """Seconds of serving debtors since the last step, by the cost model."""
        self._serving = threading.Lock()
        self.overlaps, self._due_s = True, 0.0
        self._before: Sequence[Sampled | None] | None = None
        """The tokens of the step submitted last."""

    @classmethod
    def of(
        cls, model: str, kv_blocks: int, block_tokens: int, config: "SimulatedConfig"
    ) -> "SimulatedEngine":
        """Return an engine with the vocabulary and context of the model in a folder. Raises ConfigError."""
        folder = source_of(model)
        if not isinstance(folder, Path):
            text = f"a simulated engine reads config.json, and {model!r} is no folder: name one"
            raise ConfigError(text, param="model")
        found = json.loads((folder / "config.json").read_bytes())
        try:
            sizes = {"vocabulary": found["vocab_size"], "max_positions": found["max_position_embeddings"]}
        except KeyError as missing:
            raise ConfigError(f"{folder}/config.json has no {missing}", param="model") from missing
        sizes |= {"kv_blocks": kv_blocks, "block_tokens": block_tokens}
        cost = find_cost(config.cost)
        return cls(**sizes, cost=cost, remote_cost=RemoteCost(cost), speed=config.speed)

    @property
    def pools(self) -> "LayerPools":
        """Token ids `[kv_blocks, block_tokens]`, as a single layer."""
        return [(self.tokens,)]

    def records(self) -> Records:
        """Return the blocks as rows of bytes, for use by one thread."""
        return records_of(self.pools)

    def extend(self, homes: Homes, remote: RemoteTokens) -> None:
        self._elsewhere = homes, remote

    def serve(self, seen_tokens: int, *, is_busy: bool) -> float:
        assert self._remote_cost is not None
        served_s = self._remote_cost.serving_s(seen_tokens)
        if is_busy:
            with self._serving:
                self._served_s += served_s
        return served_s / self._speed

    def make_pool(self) -> BlockPool:
        """Return a pool of the engine's blocks."""
        return BlockPool(self.kv_blocks, self.block_tokens)

    def step(self, rows: Sequence[Row]) -> Sequence[Sampled | None]:
        """See `Engine`. Raises CreditorLost, or InternalError if blocks hold other tokens than the row's."""
        took_s = self._took_s(rows)
        for row in rows:
            self._write(row)
        self._sleep(took_s)
        return self._told(rows)

    def submit(self, rows: StepRows) -> "StepTicket":
        """See `OverlappingEngine`. Blocks are written when the step is over. Raises CreditorLost."""
        known = rows if self._before is None else rows.known(self._before)
        due_s = max(time.monotonic(), self._due_s) + self._took_s(known)
        self._due_s, self._before = due_s, self._told(known)
        return _Ticket(self, known, due_s, self._before)

    def end(self, rows: Sequence[Row], due_s: float) -> None:
        """Wait until then, and write the rows."""
        left_s = due_s - time.monotonic()
        if left_s > 0:
            self._sleep(left_s)
        for row in rows:
            self._write(row)

    def _took_s(self, rows: Sequence[Row]) -> float:
        """Run the creditors' parts of a step; return the seconds that the step takes."""
        divided = self._divided(rows)
        work = split_singles([(row.first_position, row.first_position + len(row.tokens)) for row in rows])
        took_s = self._cost.step_s(*work) if divided is None else self._divided_s(divided, *work)
        with self._serving:
            served_s, self._served_s = self._served_s, 0.0
        return (took_s + served_s) / self._speed

    def _told(self, rows: Sequence[Row]) -> list[Sampled | None]:
        return [None if row.point is None else self._sampled(row.point) for row in rows]

    def _write(self, row: Row) -> None:
        """Write the row's tokens to own blocks; after a chunk or a full block check all earlier tokens."""
        end, point, size = row.first_position + len(row.tokens), row.point, self.block_tokens
        if len(row.tokens) > 1 or point is None or point.index == -point.sampling.forced_tokens:  # a chunk
            table = np.asarray(row.blocks[: -(-end // size)], dtype=np.int64)
            places = np.arange(row.first_position, end)
            blocks = table[places // size]
            is_own = blocks < self.kv_blocks
            written = np.asarray(row.tokens, dtype=np.int32)[is_own]
            self.tokens[blocks[is_own], places[is_own] % size] = written
        else:
            block, offset = divmod(row.first_position, size)
            if row.blocks[block] < self.kv_blocks:
                self.tokens[row.blocks[block], offset] = row.tokens[0]
            if end % size:
                return
        if point is None or len(point.tokens) < end:
            return
        table = np.asarray(row.blocks[: -(-end // size)], dtype=np.int64)
        is_own = table < self.kv_blocks
        held = self.tokens[table[is_own]].reshape(-1)
        due = np.asarray(point.tokens[:end], dtype=np.int32)[np.repeat(is_own, size)[:end]]
        if not np.array_equal(held[: len(due)], due):
            raise InternalError("blocks hold the KV of other tokens than the sequence's")

    def _divided(self, rows: Sequence[Row]) -> "_Divided | None":
        """Run the creditors' parts of a step; return None if all blocks are own.

        Raises CreditorLost, or InternalError if a creditor holds other tokens than the sequence's."""
        if self._elsewhere is None or self._elsewhere[0].is_empty:
            return None
        homes, remote = self._elsewhere
        away = [row for row in rows if max(row.blocks) >= self.kv_blocks]
        spans = [Span(row.first_position, len(row.tokens), row.blocks) for row in away]
        packed = pack(spans, self.block_tokens)
        parts = split(packed, homes, self.block_tokens)[1:] if away else []
        if not parts:
            return None
        seen = remote.attend(parts, np.concatenate([np.asarray(row.tokens, dtype=np.int32) for row in away]))
        divided = _Divided()
        sums: list[dict[int, int]] = [{} for _ in away]
        for part, each in zip(parts, seen, strict=True):
            blocks = part.spans.blocks.size
            divided.blocks += blocks
            if each.is_copied:
                divided.copied_tokens += blocks * self.block_tokens
            else:
                divided.remote_tokens[part.holder] = 0
            at = np.searchsorted(packed.first_row, part.rows[part.spans.first_row[:-1]], side="right") - 1
            for row, sum_ in zip(at.tolist(), each.sums.tolist(), strict=True):
                sums[row][part.holder] = sum_
        for row, found in zip(away, sums, strict=True):
            end = row.first_position + len(row.tokens)
            holders = np.repeat(
                homes.locate(row.blocks[: -(-end // self.block_tokens)])[0], self.block_tokens
            )
            if row.point is not None and len(row.point.tokens) >= end:
                _check_seen(np.asarray(row.point.tokens[:end], dtype=np.int32), holders[:end], found)
            if len(row.tokens) == 1:
                for holder in divided.remote_tokens:
                    divided.remote_tokens[holder] += int(np.count_nonzero(holders[:end] == holder))
        return divided

    def _divided_s(
        self, divided: "_Divided", chunks: Sequence[tuple[int, int]], decodes: int, context_tokens: int
    ) -> float:
        """Return the seconds of a step, and add the creditors' share to the totals."""
        assert self._remote_cost is not None
        local_tokens = context_tokens - sum(divided.remote_tokens.values())
        took_s = self._remote_cost.step_s(chunks, decodes, local_tokens, divided.remote_tokens.values())
        took_s += self._remote_cost.copy_s(divided.copied_tokens)
        waited_s = (took_s - self._cost.step_s(chunks, decodes, local_tokens)) / self._speed
        self.remote.on_step(waited_s, 0 if chunks else divided.blocks)
        return took_s

    def _sampled(self, point: SamplePoint) -> Sampled:
        sampling = point.sampling
        forced = point.forced
        token = token_at(sampling, point.choice, point.index, self.vocabulary) if forced is None else forced
        if sampling.top_logprobs is None:
            return Sampled(token)
        return Sampled(token, TokenLogprobs(chosen=0.0, top=((token, 0.0),) if sampling.top_logprobs else ()))


@dataclass(frozen=True, slots=True)
class _Ticket:
    """A step that is over at `due_s`."""

    engine: SimulatedEngine
    rows: Sequence[Row]
    due_s: float
    tokens: Sequence[Sampled | None]

    def result(self) -> Sequence[Sampled | None]:
        self.engine.end(self.rows, self.due_s)
        return self.tokens


@dataclass(slots=True)
class _Divided:
    """Counts of a step in which other workers hold blocks."""

    remote_tokens: dict[int, int] = field(default_factory=dict)
    """Number of decode context tokens at each creditor that computes."""
    copied_tokens: int = 0
    blocks: int = 0
    """Number of remote blocks in use."""


def _check_seen(tokens: npt.NDArray[np.int32], holders: npt.NDArray[np.int32], sums: dict[int, int]) -> None:
    """Compare the creditors' checksums with a row's tokens, of which each is at one of `holders`."""
    for holder, sum_ in sums.items():
        if zlib.crc32(tokens[holders == holder].tobytes()) != sum_:
            raise InternalError("a creditor holds the KV of other tokens than the sequence's")


def token_sums(tokens: npt.NDArray[np.int32], spans: PackedSpans) -> npt.NDArray[np.uint32]:
    """Return `SeenTokens.sums` of a part whose blocks are rows of `tokens` `[blocks, block_tokens]`."""
    found = np.zeros(len(spans.key_end), dtype=np.uint32)
    for index, (start, end) in enumerate(zip(spans.table_start, spans.key_end, strict=True)):
        table = spans.blocks[start : start - (-end // tokens.shape[1])]
        found[index] = zlib.crc32(tokens[table].reshape(-1)[:end].tobytes())
    return found


def token_at(sampling: Sampling, choice: int, index: int, vocabulary: int) -> int:
    """Return the token at `index` of an answer: text, or an end token at the answer's length."""
    is_last = index + 1 >= answer_tokens(sampling.seed, choice)
    if sampling.end_token_ids and is_last and index >= sampling.min_tokens:
        return sampling.end_token_ids[0]
    first = min(_FIRST_TEXT_TOKEN, vocabulary // 2)
    token = first + _hash(sampling.seed, choice, index) % (vocabulary - first)
    for _ in sampling.end_token_ids:  # skip end tokens
        if token not in sampling.end_token_ids:
            break
        token = first + (token + 1 - first) % (vocabulary - first)
    return token


def answer_tokens(seed: int, choice: int) -> int:
    """Return the length of an answer in tokens, including its end token."""
    uniform = (_hash(seed, choice, -1) + 0.5) / 2**64
    return max(1, round(_MEDIAN_ANSWER_TOKENS * math.exp(_ANSWER_SPREAD * NormalDist().inv_cdf(uniform))))


def _hash(seed: int, choice: int, index: int) -> int:
    """Return a 64-bit hash."""
    digest = blake2b(f"{seed} {choice} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
