"""Workloads by name: where lengths come from, their substitutes without data, and arrivals.

With the data sets, lengths are sampled from them. Without, they are drawn from the quantiles below, taken
from the same data (log-linear in between; prompt and answer independent, as rank correlations are at most
0.24). Book chunks have no answers: lengths are drawn to papers/003's Table 2, mean 681 in [32, 1041]. LMSYS
has no prompts: lengths are drawn from ShareGPT's. Each workload has one constant `max_tokens`, all that
policies know of an answer's length.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from random import Random

from shared.errors import ConfigError
from sim.requests import SimRequest
from sim.traces import TraceRow, read_trace

QUANTILES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
LEAST_TRAINING_ROWS = 100


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens, by its values at `QUANTILES`."""

    at_quantiles: tuple[int, ...]

    def draw(self, random: Random) -> int:
        return self.at(random.random())

    def at(self, share: float) -> int:
        """Return the quantile `share`, between 0 and 1."""
        index = next(i for i in range(1, len(QUANTILES)) if share <= QUANTILES[i])
        low, high = QUANTILES[index - 1], QUANTILES[index]
        part = (share - low) / (high - low)
        below, above = math.log(self.at_quantiles[index - 1]), math.log(self.at_quantiles[index])
        return max(1, round(math.exp(below + part * (above - below))))


BOOK_ANSWERS = Lengths((32, 110, 240, 330, 450, 545, 620, 690, 760, 830, 900, 985, 1015, 1036, 1041))
"""Made up to match the paper's mean, minimum and maximum."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload. `file` is relative to the data folder; rows above the limits are left out."""

    name: str
    file: str
    prompt: Lengths
    output: Lengths
    longest_prompt_tokens: int
    max_tokens: int
    answers_are_drawn: bool = False
    prompts_are_drawn: bool = False


_CHAT_PROMPTS = Lengths((1, 2, 6, 9, 13, 17, 24, 33, 51, 89, 181, 542, 1056, 1748, 2048))
"""ShareGPT's prompt lengths, also used for LMSYS."""
WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(
            "sharegpt",
            "sharegpt_lengths/sharegpt_val_10k_llama2.csv",
            _CHAT_PROMPTS,
            Lengths((4, 10, 23, 44, 107, 168, 233, 286, 341, 403, 497, 665, 812, 962, 1024)),
            2048,
            1024,
        ),
        Workload(
            "alpaca",
            "alpaca/alpaca_token_lengths.csv",
            Lengths((4, 6, 8, 9, 11, 13, 14, 16, 18, 21, 25, 34, 44, 83, 605)),
            Lengths((1, 2, 4, 7, 12, 19, 29, 47, 67, 86, 107, 139, 175, 290, 507)),
            1024,
            512,
        ),
        Workload(
            "books",
            "gutenberg",
            Lengths((18, 23, 114, 338, 890, 1444, 1948, 2048, 2048, 2048, 2048, 2048, 2048, 2048, 2048)),
            BOOK_ANSWERS,
            2048,
            1041,
            answers_are_drawn=True,
        ),
        Workload(
            "azure",
            "azure/AzureLLMInferenceTrace_conv.csv",
            Lengths((2, 28, 181, 206, 386, 402, 461, 1014, 1064, 1119, 1313, 2425, 4077, 4089, 4096)),
            Lengths((7, 16, 42, 56, 79, 92, 104, 132, 181, 385, 401, 425, 452, 602, 1000)),
            4096,
            1024,
        ),
        Workload(
            "azure_code",
            "azure/AzureLLMInferenceTrace_code.csv",
            Lengths((3, 17, 75, 147, 385, 770, 1075, 1469, 1909, 2433, 3192, 5187, 7303, 7436, 7437)),
            Lengths((6, 6, 6, 7, 8, 9, 11, 13, 16, 20, 29, 55, 90, 251, 800)),
            8192,
            2048,
        ),
        Workload(
            "mooncake",
            "mooncake/conversation_trace.jsonl",
            Lengths(
                (891, 894, 901, 964, 1662, 3263, 4993, 6909, 9570, 13196, 17869, 27367, 39550, 85400, 126195)
            ),
            Lengths((1, 3, 10, 24, 100, 213, 291, 350, 399, 447, 504, 597, 698, 1118, 2000)),
            131_072,
            2048,
        ),
        Workload(
            "turns",
            "sharegpt_lengths/sharegpt_8k_filtered_stats_llama2_tokenizer.csv",
            Lengths((1, 12, 29, 74, 382, 777, 1203, 1730, 2401, 3235, 4278, 5696, 6563, 7434, 8141)),
            Lengths((2, 6, 44, 84, 181, 271, 346, 415, 493, 581, 683, 834, 920, 998, 1024)),
            8192,
            2048,
        ),
        Workload(
            "arxiv",
            "vidur/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv",
            Lengths((1, 614, 1123, 1486, 1925, 2244, 2530, 2787, 3042, 3280, 3507, 3712, 3818, 3936, 4054)),
            Lengths((5, 35, 59, 77, 102, 122, 142, 162, 185, 212, 249, 316, 389, 650, 1024)),
            4096,
            1024,
        ),
        Workload(
            "lmsys",
            "lmsys_proxy/predictions_warmup_multi_cls_1000K.csv",
            _CHAT_PROMPTS,
            Lengths((2, 2, 9, 13, 31, 57, 95, 140, 201, 263, 325, 397, 447, 502, 511)),
            2048,
            512,
            prompts_are_drawn=True,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Source:
    """A workload and the path of its data, if present. With `path` alone, any trace file."""

    workload: str | None = None
    path: Path | None = None
    max_tokens: int | None = None
    """Overrides the workload's limit; a trace file's is its longest answer, rounded up to 256."""

    @property
    def name(self) -> str:
        return self.workload or (self.path.stem if self.path else "")


def find_source(workload: str, data: Path | None) -> Source:
    """Return the workload with its data, if `data` has it, else generated. Raises ConfigError for unknown
    names."""
    if workload not in WORKLOADS:
        raise ConfigError(f"no workload {workload!r}; there are {', '.join(WORKLOADS)}", param="workload")
    path = data / WORKLOADS[workload].file if data is not None else None
    return Source(workload, path if path is not None and path.exists() else None)


@lru_cache(maxsize=8)
def _rows(source: Source) -> tuple[TraceRow, ...]:
    if source.path is None:
        return ()
    rows = read_trace(source.path)
    workload = WORKLOADS[source.workload] if source.workload is not None else None
    if workload is None:
        return tuple(rows)
    random = Random(f"answers/{workload.name}")
    if workload.answers_are_drawn:
        return tuple(TraceRow(row.prompt_tokens, workload.output.draw(random)) for row in rows)
    if workload.prompts_are_drawn:
        rows = [replace(row, prompt_tokens=workload.prompt.draw(random)) for row in rows]
    return tuple(
        row
        for row in rows
        if row.prompt_tokens <= workload.longest_prompt_tokens and row.output_tokens <= workload.max_tokens
    )


def limit_tokens(source: Source) -> int:
    """Return the constant `max_tokens` of every request from `source`."""
    if source.max_tokens is not None:
        return source.max_tokens
    if source.workload is not None:
        return WORKLOADS[source.workload].max_tokens
    longest = max(row.output_tokens for row in _rows(source))
    return -(-longest // 256) * 256


def has_predictions(source: Source) -> bool:
    """Whether the trace has predictions of a trained model."""
    return any(row.predicted_tokens is not None for row in _rows(source))


def longest_tokens(source: Source) -> int:
    """Return the longest prompt plus answer in the data, or by its distribution."""
    rows = _rows(source)
    if rows or source.workload is None:
        return max(row.prompt_tokens + row.output_tokens for row in rows)
    workload = WORKLOADS[source.workload]
    return workload.prompt.at_quantiles[-1] + workload.output.at_quantiles[-1]


def _split(source: Source, *, is_training: bool) -> Sequence[TraceRow]:
    """Return a fixed random third for training, or the rest; all rows if there are too few to split."""
    rows = list(_rows(source))
    if len(rows) < 2 * LEAST_TRAINING_ROWS:
        return rows
    Random(f"split/{source.name}").shuffle(rows)
    third = len(rows) // 3
    return rows[:third] if is_training else rows[third:]


def _pick(source: Source, count: int, random: Random, *, is_training: bool = False) -> list[TraceRow]:
    """Sample rows without repetition while they last; draw from the distributions if there are none."""
    rows = _split(source, is_training=is_training)
    if rows:
        picked: list[TraceRow] = []
        while len(picked) < count:
            picked += random.sample(rows, min(len(rows), count - len(picked)))
        return picked
    if source.workload is None:
        raise ConfigError("neither a workload nor a trace file", param="trace")
    workload = WORKLOADS[source.workload]
    return [TraceRow(workload.prompt.draw(random), workload.output.draw(random)) for _ in range(count)]


def _request(index: int, arrival_s: float, row: TraceRow, max_tokens: int) -> SimRequest:
    output_tokens = min(row.output_tokens, max_tokens)
    prompt_tokens, told = row.prompt_tokens, row.predicted_tokens
    return SimRequest(index, arrival_s, prompt_tokens, output_tokens, max_tokens, told, names=row.names)


def poisson_requests(source: Source, *, count: int, rate_per_s: float, seed: int) -> list[SimRequest]:
    """Return `count` requests with Poisson arrivals; with an infinite rate all arrive at 0. The same seed
    gives the same requests and the same gaps, scaled by 1/rate."""
    rows, limit = _pick(source, count, Random(f"{seed}/lengths")), limit_tokens(source)
    times_s = poisson_times(Random(f"{seed}/arrivals"), rate_per_s)
    return [_request(index, next(times_s), row, limit) for index, row in enumerate(rows)]


def poisson_times(random: Random, rate_per_s: float) -> Iterator[float]:
    """Yield arrival times without end, in seconds; another rate only scales them."""
    at_s = 0.0
    while True:
        at_s += random.expovariate(1.0) / rate_per_s
        yield at_s


def trace_requests(source: Source, *, count: int | None = None, speed: float = 1.0) -> list[SimRequest]:
    """Return requests at the trace's arrival times, `speed` times as fast. Raises ConfigError if there are
    none."""
    rows = _rows(source)[:count]
    if not rows or any(row.arrival_s is None for row in rows):
        raise ConfigError(f"trace {source.name!r} has no arrival times; ask for a rate", param="trace")
    limit = limit_tokens(source)
    return [_request(i, (row.arrival_s or 0.0) / speed, row, limit) for i, row in enumerate(rows)]


def training_requests(source: Source, *, count: int, seed: int) -> list[SimRequest]:
    """Return requests for predictors to learn from; none of them is replayed."""
    rows = _pick(source, count, Random(f"{seed}/training"), is_training=True)
    return [_request(index, 0.0, row, limit_tokens(source)) for index, row in enumerate(rows)]
