"""Long conversations for placement: arrivals, sizes and growth.

papers/000 §VIII-B: ShareGPT's conversations made ten times longer, with Poisson or Azure arrivals (or gamma
gaps of the same mean and spread). A conversation larger than a GPU is left out and counted.
"""

from dataclasses import dataclass
from pathlib import Path
from random import Random

from sim.traces import read_trace
from sim.workloads import Source, find_source, poisson_requests

BLOCK_TOKENS = 16
LONGER = 10
"""Factor on the trace's lengths."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """KV capacity of a GPU, and decoding speed on it."""

    name: str
    label: str
    capacity_tokens: int
    """KV beside the weights."""
    tokens_per_s: float
    """Speed of one running request."""

    @property
    def capacity_blocks(self) -> int:
        return self.capacity_tokens // BLOCK_TOKENS


A100 = Hardware("13b_a100", "LLaMA-13B on A100-40G", 16_000, 30.0)
"""Design §3: 40 GB less 26 GB of weights, 0.8 MB per token, the rest for activations."""
RTX4090 = Hardware("7b_24g", "LLaMA-7B on 24 GB", 13_600, 40.0)
"""0.9 × 24 GB − 13.5 GB of weights − 1 GB of activations, 0.52 MB per token."""


@dataclass(frozen=True, slots=True)
class Job:
    """One conversation. Policies know only `most_tokens`, its largest possible size."""

    index: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    most_tokens: int

    def blocks_at(self, running_s: float, tokens_per_s: float) -> int:
        """Return its size after `running_s` seconds of decoding."""
        tokens = self.prompt_tokens + min(self.output_tokens, int(running_s * tokens_per_s))
        return -(-tokens // BLOCK_TOKENS)

    def runs_s(self, tokens_per_s: float) -> float:
        return self.output_tokens / tokens_per_s


AZURE_FILE = "azure/AzureLLMInferenceTrace_conv.csv"
AZURE_RATE_PER_S = 5.53
AZURE_GAP_VARIATION = 1.09
"""Standard deviation of the gaps divided by their mean, in that trace."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Arrivals; with `rate_per_s` None, Azure's."""

    name: str
    label: str
    rate_per_s: float | None
    duration_s: float


def make_jobs(
    workload: Workload, hardware: Hardware, *, data: Path | None, source: Source | None, seed: int
) -> tuple[list[Job], int]:
    """Return the jobs that fit a GPU, and the number left out. `source` replaces ShareGPT's lengths."""
    lengths = source or find_source("sharegpt", data)
    if workload.rate_per_s is not None:
        times = _poisson_times(workload.rate_per_s, workload.duration_s, seed)
    else:
        times = _azure_times(workload.duration_s, data, seed)
    rows = poisson_requests(lengths, count=len(times), rate_per_s=1.0, seed=seed)
    jobs = []
    for at_s, row in zip(times, rows, strict=True):
        prompt, output = LONGER * row.prompt_tokens, LONGER * row.output_tokens
        most = min(hardware.capacity_tokens, prompt + LONGER * row.max_tokens)
        if prompt + output <= hardware.capacity_tokens:
            jobs.append(Job(row.index, at_s, prompt, output, most))
    return jobs, len(rows) - len(jobs)


def _poisson_times(rate_per_s: float, duration_s: float, seed: int) -> list[float]:
    draw = Random(f"{seed}/placement/{rate_per_s}")
    times = [draw.expovariate(rate_per_s)]
    while times[-1] < duration_s:
        times.append(times[-1] + draw.expovariate(rate_per_s))
    return times


def _azure_times(duration_s: float, data: Path | None, seed: int) -> list[float]:
    path = data / AZURE_FILE if data is not None else None
    if path is not None and path.exists():
        return [
            row.arrival_s
            for row in read_trace(path)
            if row.arrival_s is not None and row.arrival_s < duration_s
        ]
    draw = Random(f"{seed}/placement/azure")
    shape = AZURE_GAP_VARIATION**-2
    times = [0.0]
    while times[-1] < duration_s:
        times.append(times[-1] + draw.gammavariate(shape, 1 / (shape * AZURE_RATE_PER_S)))
    return times
