"""A model runner that keeps requests as vLLM's does, and whose KV shows which tokens it was computed from.

In place of keys and values the blocks hold tokens. The likeliest next token is a hash of all tokens that the
block table leads to: a wrong block, a stale request or a token too many changes the answer."""

from collections.abc import Mapping, Sequence
from zlib import crc32

import torch

from services.worker.engine.sampler import Logits
from services.worker.engine.vllm.requests import NULL_BLOCKS, ContinuedRequest, NewRequest
from services.worker.engine.vllm.seam import Draw

VOCABULARY = 64


class Broken(Exception):
    """A step that was told to fail."""


def next_token(context: Sequence[int]) -> int:
    """What a greedy answer goes on with."""
    return crc32(bytes(context)) % VOCABULARY


class _Kept:
    def __init__(self, request: NewRequest) -> None:
        self.tokens = [int(token) for token in request.tokens]
        self.prompt_tokens = len(self.tokens)
        self.blocks = list(request.blocks)
        self.computed = request.computed


class TokenRunner:
    """A `ModelRunner`. `break_next`: "before" or "after" the next step's requests are known, it fails."""

    version = "0"
    max_positions = 1024
    vocabulary = VOCABULARY
    dtype = torch.float32
    layout = "tokens"

    def __init__(self, kv_blocks: int, block_tokens: int) -> None:
        self._blocks = torch.zeros(kv_blocks + NULL_BLOCKS, block_tokens, dtype=torch.int32)
        self._requests: dict[str, _Kept] = {}
        self.break_next = ""
        self.closed = False
        self.most_requests = self.new = self.continued = 0

    @property
    def kv(self) -> Sequence[torch.Tensor]:
        return [self._blocks]

    def run(
        self,
        new: Sequence[NewRequest],
        continued: Sequence[ContinuedRequest],
        counts: Mapping[str, int],
        finished: set[str],
        draw: Draw,
    ) -> None:
        breaks, self.break_next = self.break_next, ""
        if breaks == "before":
            raise Broken
        for name in finished:
            self._requests.pop(name, None)
        for request in new:
            assert request.name not in self._requests
            self._requests[request.name] = _Kept(request)
        for each in continued:
            kept = self._requests[each.name]
            kept.blocks += each.more_blocks
            kept.computed = each.computed
            assert len(kept.tokens) == kept.prompt_tokens + each.outputs == each.computed + 1
        assert set(counts) == set(self._requests), "requests are kept that no step has"
        self.new, self.continued = self.new + len(new), self.continued + len(continued)
        self.most_requests = max(self.most_requests, len(counts))
        if breaks == "after":
            raise Broken
        names = sorted(counts, key=lambda name: crc32(name.encode()))
        logits = torch.stack([self._computed(self._requests[name], counts[name]) for name in names])
        for name, token in zip(names, draw(Logits(logits), names), strict=True):
            kept = self._requests[name]
            if kept.computed + counts[name] >= kept.prompt_tokens:
                kept.tokens.append(token)

    def close(self) -> None:
        self.closed = True

    def _computed(self, kept: _Kept, count: int) -> torch.Tensor:
        block_tokens = self._blocks.shape[1]
        end = kept.computed + count
        assert 0 not in kept.blocks
        for position in range(kept.computed, end):
            block, offset = divmod(position, block_tokens)
            self._blocks[kept.blocks[block], offset] = kept.tokens[position]
        context = self._blocks[kept.blocks].reshape(-1)[:end].tolist()
        return torch.nn.functional.one_hot(torch.tensor(next_token(context)), VOCABULARY).float()
