"""Host work of the engine's thread, door to frames, without the model, for `bench host` and `bench step`.

Plans come through the door; the thread runs them and sends the frames to a socket. The logits are
precomputed. Context lengths are staggered, so every step fills the same number of blocks.
"""

import gc
import socket
from collections.abc import Callable
from contextlib import suppress
from statistics import median
from time import thread_time
from typing import Any

import torch

from services.worker.core.prefixes import Prefixes
from services.worker.core.reports import Identity
from services.worker.core.sequences import SequenceLimits, SequenceTable
from services.worker.core.settings import PrefixCacheConfig
from services.worker.core.steps import StepCore
from services.worker.door import Door
from services.worker.egress import Courier, Outbox
from services.worker.engine.engine import TorchEngine
from services.worker.engine.sampler import Logits
from services.worker.engine_thread import Runner
from services.worker.kv.store import open_store
from services.worker.kv.transfers import TransferEngine
from shared.bus.counters import BusCounters
from shared.bus.express import Express
from shared.clock import monotonic_s
from shared.config import BusConfig
from shared.messages.plans import BatchPlan, Decode, PrefillChunk
from shared.messages.sequence import Sampling, SequenceRef, SequenceSpec, pack_tokens

_EVER_S = 1e9
_WARM_PLANS, _PLANS, _PLAN_STEPS, _BLOCK_TOKENS = 3, 24, 8, 16


class WithoutModel(TorchEngine):
    """An engine that packs and samples but does not compute. It has ids for `kv_blocks` blocks and memory
    for one."""

    def __init__(self, model: Any, *, kv_blocks: int, block_tokens: int, rows: int) -> None:
        super().__init__(model, kv_blocks=1, block_tokens=block_tokens)
        self.kv_blocks = kv_blocks
        values = torch.zeros(rows, model.vocabulary)
        found = Logits(values, values[:, 0].contiguous(), torch.full((rows,), 7))
        self._forward: Callable[..., Logits] = lambda *_: found


def thread_us_per_row(
    model: Any, rows: int, *, chunk_tokens: int = 0, context_tokens: int = 512, plans: int = _PLANS
) -> float:
    """Return the median CPU microseconds per row and step of the engine's thread, without the model.

    A plan's steps have `rows` decodes each. With `chunk_tokens`, a plan is one step, with a prompt of so many
    tokens beside the decodes; its time is divided by the decodes, so that both cases compare."""
    thread = _Thread(model, rows, chunk_tokens, context_tokens, _WARM_PLANS + plans)
    try:
        gc.collect()
        taken = [thread.plan_us() for _ in range(_WARM_PLANS + plans)]
        return median(taken[_WARM_PLANS:]) / rows
    finally:
        thread.close()


class _Thread:
    """An engine's thread, run step by step by its caller."""

    def __init__(self, model: Any, rows: int, chunk_tokens: int, context_tokens: int, plans: int) -> None:
        self._chunk, self._seq, self._gone = chunk_tokens, 1, 0
        self._steps = 1 if chunk_tokens else _PLAN_STEPS
        longest = context_tokens + 2 * _BLOCK_TOKENS + plans * self._steps
        self._each = -(-longest // _BLOCK_TOKENS)
        kv_blocks = rows * self._each + 4 * -(-max(1, chunk_tokens) // _BLOCK_TOKENS)
        engine = WithoutModel(model, kv_blocks=kv_blocks, block_tokens=_BLOCK_TOKENS, rows=rows + 1)
        cache = PrefixCacheConfig()
        self._store = open_store(cache, engine, "bench", TransferEngine(lambda: None))
        prefixes = Prefixes(self._store.cache, self._store.fingerprint)
        limits = SequenceLimits(max(longest, chunk_tokens + 2), engine.vocabulary, _EVER_S, _EVER_S)
        table = SequenceTable(self._store.cache, limits, prefixes)
        self._core = StepCore(Identity("bench", 1, "bench", longest, "here"), table)
        here, self._there = socket.socketpair()
        self._there.setblocking(False)
        self._courier = Courier(Outbox(None), lambda run: None)  # type: ignore[arg-type]
        self._courier.offer(Express(here, BusConfig(), 1 << 23, BusCounters(None)))
        self._door = Door(self._core, monotonic_s, self._courier.deliver)
        self._broken: list[BaseException] = []
        self._runner = Runner(self._door, engine, on_broken=self._broken.append, between=prefixes.work_ahead)
        self._sampling = Sampling(seed=0, max_tokens=1 << 20, temperature=0.0)
        self._vocabulary = engine.vocabulary - 8
        self._refs = [SequenceRef(request_id=f"req_{at:028d}", choice=0, attempt=1) for at in range(rows)]
        starts, chunks = [], []
        for number, ref in enumerate(self._refs):
            tokens = context_tokens + number % _BLOCK_TOKENS
            starts.append(self._spec(ref, number, tokens, self._sampling))
            chunks.append(PrefillChunk(ref=ref, first_token=0, end_token=tokens, allocated_blocks=self._each))
        self._plan(1, starts=tuple(starts), prefills=tuple(chunks))
        self._turn()

    def plan_us(self) -> float:
        """Run one plan; return the CPU microseconds of a step."""
        decodes = tuple(Decode(ref=ref, allocated_blocks=self._each) for ref in self._refs)
        more: dict[str, Any] = {}
        if self._chunk:
            self._gone += 1
            ref = SequenceRef(request_id=f"prompt_{self._gone:026d}", choice=0, attempt=1)
            one, blocks = Sampling(seed=0, max_tokens=1, temperature=0.0), -(-self._chunk // _BLOCK_TOKENS)
            more["starts"] = (self._spec(ref, 100_000 + self._gone, self._chunk, one),)
            chunk = PrefillChunk(ref=ref, first_token=0, end_token=self._chunk, allocated_blocks=blocks)
            more["prefills"] = (chunk,)
        began_s = thread_time()
        self._plan(self._steps, decodes=decodes, **more)
        for _ in range(self._steps):
            self._turn()
        took_s = thread_time() - began_s
        with suppress(BlockingIOError):
            while self._there.recv(1 << 20):
                pass
        assert not self._core.has_plans and not self._broken, "the plan did not run as planned"
        return 1e6 * took_s / self._steps

    def close(self) -> None:
        self._courier.close()
        self._there.close()
        self._store.close(10.0)

    def _turn(self) -> None:
        self._runner._take_commands()
        self._runner._between()
        self._runner._step()

    def _plan(self, steps: int, **items: Any) -> None:
        plan = BatchPlan(epoch=1, seq=self._seq, steps=steps, report_at=steps, valid_for_s=_EVER_S, **items)
        self._seq += 1
        self._door.post(lambda core, now_s: core.on_plan(plan, now_s))

    def _spec(self, ref: SequenceRef, number: int, tokens: int, sampling: Sampling) -> SequenceSpec:
        prompt = [8 + (number * 7919 + at * (number + 31)) % self._vocabulary for at in range(tokens)]
        about: Any = {"gateway_id": "gateway-0", "gateway_incarnation": 1, "prompt": pack_tokens(prompt)}
        return SequenceSpec(ref=ref, sampling=sampling, **about)


CASES = {f"thread_us_per_row_b{rows}": (rows, 0) for rows in (1, 32, 128, 256)}
CASES |= {f"thread_us_per_row_b{rows}_chunk512": (rows, 512) for rows in (32, 128)}
"""Rows and tokens of a chunk, by figure."""
