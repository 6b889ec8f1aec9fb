"""Host work of a worker in a decode step, without the model, for `python -m bench step`.

`host_ms` runs the worker's core, prefix cache and engine from a ready plan to the sent frames; the logits are
precomputed. Context lengths are staggered by one token, so every step has the same number of new blocks.
`split_ms` is the extra cost before the first layer if some sequences have borrowed blocks.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import thread_time
from typing import Any

import torch

from services.worker.core.prefixes import Prefixes
from services.worker.core.reports import Identity
from services.worker.core.sampling import Sampled
from services.worker.core.sequences import SequenceLimits, SequenceTable
from services.worker.core.steps import StepCore
from services.worker.engine.engine import TorchEngine
from services.worker.engine.partition import Homes, split
from services.worker.engine.sampler import Logits
from services.worker.engine.spans import Span, pack
from services.worker.engine_thread import row_of
from services.worker.kv.core.block_pool import block_table
from services.worker.kv.core.settings import PrefixCacheConfig
from services.worker.kv.store import KvStore, open_store
from services.worker.kv.transfers import TransferEngine
from shared.messages.plans import BatchPlan, Decode, PrefillChunk
from shared.messages.sequence import Sampling, SequenceRef, SequenceSpec, pack_tokens

_EVER_S = 1e9
_WARM_STEPS = 3


class WithoutModel(TorchEngine):
    """An engine that packs and samples but does not compute. It has ids for `kv_blocks` blocks and memory
    for one."""

    def __init__(self, model: Any, *, kv_blocks: int, block_tokens: int, rows: int) -> None:
        super().__init__(model, kv_blocks=1, block_tokens=block_tokens)
        self.kv_blocks = kv_blocks
        values = torch.zeros(rows, model.vocabulary)
        found = Logits(values, values[:, 0].contiguous(), torch.full((rows,), 7))
        self._forward: Callable[..., Logits] = lambda *_: found


@dataclass(frozen=True)
class Decoding:
    """A worker whose sequences are all decoding."""

    core: StepCore
    engine: TorchEngine
    store: KvStore

    def step_s(self) -> float:
        """Run the plan's next step and return its CPU seconds in this thread."""
        began_s = thread_time()
        work, _ = self.core.begin_step(0.0)
        assert work is not None, "the plan is over"
        sampled = self.engine.step([row_of(item) for item in work.items])
        self.core.finish_step(work, sampled, 0.0, 0.0)
        return thread_time() - began_s


def host_ms(model: Any, batch: int, context_tokens: int, block_tokens: int, steps: int) -> float:
    """Return the median CPU milliseconds of a step of `batch` decodes at about `context_tokens`, without
    the model."""
    worker = _decoding(model, batch, context_tokens, block_tokens, _WARM_STEPS + steps)
    try:
        gc.collect()
        return 1e3 * median([worker.step_s() for _ in range(_WARM_STEPS + steps)][_WARM_STEPS:])
    finally:
        worker.store.close(10.0)


def split_ms(
    batch: int, context_tokens: int, block_tokens: int, borrowers: int, borrowed_blocks: int, steps: int
) -> float:
    """Return the median CPU milliseconds to split a step of `batch` decodes. The first `borrowers`
    sequences have their last `borrowed_blocks` blocks at one creditor."""
    each = -(-(context_tokens + 1) // block_tokens)
    homes, spans, there = Homes(batch * each), [], 0
    for row in range(batch):
        blocks = list(range(row * each, (row + 1) * each))
        if row < borrowers:
            places = range(there, there := there + borrowed_blocks)
            blocks[-borrowed_blocks:] = [batch * each + place for place in places]
            homes.place(blocks[-borrowed_blocks:], 1, places)
        spans.append(Span(context_tokens, 1, block_table(blocks)))
    packed, took_s = pack(spans, block_tokens), []
    for _ in range(_WARM_STEPS + steps):
        began_s = thread_time()
        split(packed, homes, block_tokens)
        took_s.append(thread_time() - began_s)
    return 1e3 * median(took_s[_WARM_STEPS:])


def _decoding(model: Any, batch: int, context_tokens: int, block_tokens: int, steps: int) -> Decoding:
    """Return a worker with `batch` prefilled sequences and a plan of `steps` steps."""
    each = -(-(context_tokens + block_tokens + steps + 1) // block_tokens)
    engine = WithoutModel(model, kv_blocks=batch * each, block_tokens=block_tokens, rows=batch)
    store = open_store(PrefixCacheConfig(), engine, "bench", TransferEngine(lambda: None))
    longest = context_tokens + 2 * block_tokens + steps
    table = SequenceTable(
        store.cache,
        SequenceLimits(longest, engine.vocabulary, _EVER_S, _EVER_S),
        Prefixes(store.cache, store.fingerprint),
    )
    core = StepCore(Identity("bench", 1, "bench", longest, "here"), table)
    sampling = Sampling(seed=0, max_tokens=longest, temperature=0.0)
    refs = [SequenceRef(request_id=f"req_{number}", choice=0, attempt=1) for number in range(batch)]
    prompts = [_prompt(number, context_tokens + number % block_tokens, engine) for number in range(batch)]
    core.on_plan(
        BatchPlan(
            epoch=1,
            seq=1,
            starts=tuple(
                SequenceSpec(
                    ref=ref, gateway_id="bench", gateway_incarnation=1, prompt=prompt, sampling=sampling
                )
                for ref, prompt in zip(refs, prompts, strict=True)
            ),
            prefills=tuple(
                PrefillChunk(
                    ref=ref,
                    first_token=0,
                    end_token=context_tokens + number % block_tokens,
                    allocated_blocks=each,
                )
                for number, ref in enumerate(refs)
            ),
            valid_for_s=_EVER_S,
        ),
        0.0,
    )
    work, _ = core.begin_step(0.0)
    assert work is not None, "there is room for all prompts"
    core.finish_step(work, [Sampled(7)] * batch, 0.0, 0.0)
    decodes = tuple(Decode(ref=ref, allocated_blocks=each) for ref in refs)
    core.on_plan(BatchPlan(epoch=1, seq=2, steps=steps, decodes=decodes, valid_for_s=_EVER_S), 0.0)
    return Decoding(core, engine, store)


def _prompt(number: int, tokens: int, engine: TorchEngine) -> bytes:
    """Return a prompt with a unique prefix and no end token."""
    vocabulary = engine.vocabulary - 8
    return pack_tokens([8 + (number * 7919 + at * (number + 31)) % vocabulary for at in range(tokens)])
