"""An engine's sequences, driven by hand."""

from services.worker.core.sampling import SamplePoint
from services.worker.engine.contract import Row
from services.worker.engine.engine import TorchEngine
from services.worker.kv.core.block_pool import BlockPool
from shared.messages.sequence import Sampling

BLOCK_TOKENS = 4
GREEDY = Sampling(seed=0, max_tokens=64, temperature=0.0)


class Sequences:
    """Drives an engine by hand: chunks, decodes and recomputation of several prompts at once."""

    def __init__(
        self, engine: TorchEngine, pool: BlockPool, prompts: list[list[int]], sampling: Sampling
    ) -> None:
        self.engine, self.pool, self.sampling = engine, pool, sampling
        self.tokens = [list(prompt) for prompt in prompts]
        self.logprobs: list[list[float]] = [[] for _ in prompts]
        self.prompts = prompts
        self.computed = [0] * len(prompts)
        self.blocks: list[list[int]] = [[] for _ in prompts]

    def row(self, index: int, most_tokens: int) -> Row:
        first = self.computed[index]
        end = min(len(self.tokens[index]), first + most_tokens)
        missing = -(-end // BLOCK_TOKENS) - len(self.blocks[index])
        self.blocks[index] += self.pool.allocate(max(0, missing))
        self.computed[index] = end
        point = None
        if end == len(self.tokens[index]):
            point = SamplePoint(self.sampling, index, end - len(self.prompts[index]), self.tokens[index])
        return Row(self.tokens[index][first:end], first, self.blocks[index], point)

    def step(self, indices: list[int], most_tokens: int) -> None:
        rows = [self.row(index, most_tokens) for index in indices]
        for index, sampled in zip(indices, self.engine.step(rows), strict=True):
            if sampled is not None:
                self.tokens[index].append(sampled.token)
                self.logprobs[index] += [sampled.logprobs.chosen] if sampled.logprobs else []

    def preempt(self, index: int) -> None:
        self.pool.release(self.blocks[index])
        self.blocks[index], self.computed[index] = [], 0

    def answer(self, index: int, count: int) -> list[int]:
        start = len(self.prompts[index])
        return self.tokens[index][start : start + count]
