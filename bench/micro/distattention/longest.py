"""The longest context that four workers can hold together, against one worker's, with a check of the text.

Every worker has the same number of KV blocks. The debtor's staging blocks are taken from its own.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from bench.micro.distattention.creditor import GRANT, Settings, lenders
from services.worker.core.sampling import SamplePoint
from services.worker.engine.contract import Row
from services.worker.engine.engine import TorchEngine
from services.worker.engine.loading import LoadedModel, load
from services.worker.peers.attention.debtor import Debtor
from services.worker.peers.attention.staging import HALVES
from shared.messages.sequence import Sampling

BLOCK_TOKENS = 16
_STAGING_BLOCKS = 4
_CHUNK_TOKENS = 128


@dataclass(frozen=True)
class Longest:
    """Result of one run."""

    own_tokens: int
    """Tokens that fit into one worker's KV."""
    answered_tokens: int
    """Prompt and answer tokens that fit into all workers' KV."""
    is_same_text: bool

    @property
    def ratio(self) -> float:
        return self.answered_tokens / self.own_tokens


def measure_longest(folder: Path, core: int, *, blocks: int, workers: int, answer_tokens: int) -> Longest:
    """Measure with `blocks` KV blocks at each of `workers` workers, one of which is the debtor."""
    torch.set_num_threads(1)
    model = load(str(folder), dtype="float32", device="cpu")
    staged = (workers - 1) * HALVES * _STAGING_BLOCKS
    own = blocks - -(-staged // len(model.layers))
    total = own + (workers - 1) * blocks
    generator = torch.Generator().manual_seed(3)
    prompt_tokens = total * BLOCK_TOKENS - answer_tokens
    prompt = torch.randint(3, model.vocabulary, (prompt_tokens,), generator=generator).tolist()
    expected = _generate(_engine(model, total), list(range(total)), prompt, answer_tokens)
    layers = tuple((layer.kv_heads, layer.head_dim, layer.value_dim) for layer in model.layers)
    creditors = [
        Settings(
            name=f"creditor-{index}",
            layers=layers,
            blocks=blocks,
            block_tokens=BLOCK_TOKENS,
            seed=1,
            core=core,
        )
        for index in range(workers - 1)
    ]
    with lenders(creditors) as links:
        engine = _engine(model, own)
        debtor = Debtor(
            engine.attention,
            q_heads=model.module.config.num_attention_heads,
            own_blocks=own,
            block_tokens=BLOCK_TOKENS,
            staging_blocks=_STAGING_BLOCKS,
            deadline_s=30.0,
        )
        for index, link in enumerate(links):
            ids = range(own + index * blocks, own + (index + 1) * blocks)
            debtor.homes.place(ids, debtor.add(link, [GRANT]), range(blocks))
        answer = _generate(engine, list(range(total)), prompt, answer_tokens)
        debtor.close()
    return Longest(blocks * BLOCK_TOKENS, prompt_tokens + len(answer), answer == expected)


def _engine(model: LoadedModel, blocks: int) -> TorchEngine:
    return TorchEngine(model, kv_blocks=blocks, block_tokens=BLOCK_TOKENS)


def _generate(engine: TorchEngine, blocks: list[int], prompt: list[int], count: int) -> list[int]:
    """Generate greedily, with chunked prefill."""
    sampling = Sampling(seed=0, max_tokens=count, temperature=0.0)
    tokens, done = list(prompt), 0
    while len(tokens) < len(prompt) + count:
        end = min(len(tokens), done + _CHUNK_TOKENS)
        point = SamplePoint(sampling, 0, end - len(prompt), tokens) if end == len(tokens) else None
        (sampled,) = engine.step([Row(tokens[done:end], done, blocks, point)])
        done = end
        if sampled is not None:
            tokens.append(sampled.token)
    return tokens[len(prompt) :]
