"""A worker's real parts (core, engine, tiers) under plans that know nothing of hits. No bus, no threads but
the tiers' own."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from services.worker.core.plans import StepWork
from services.worker.core.prefixes import Prefixes
from services.worker.core.sequence import HeldSequence
from services.worker.core.settings import PrefixCacheConfig
from services.worker.core.steps import StepEffects
from services.worker.engine.contract import Row
from services.worker.engine.engine import TorchEngine
from services.worker.engine.loading import describe
from services.worker.engine_thread import row_of
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.core.radix_tree import Tier
from services.worker.kv.store import KvStore, open_store
from services.worker.kv.transfers import TransferEngine
from shared.messages.plans import BatchPlan, Preemption, PreemptMode, PrefixHit, WorkerStepped
from shared.messages.sequence import SequenceRef
from tests.services.worker import builders
from tests.services.worker.builders import core_of
from tests.services.worker.conftest import VOCABULARY, build_model
from tests.shared.messages.builders import decode, plan, prefill, ref, spec

BLOCK_TOKENS = 4
DEVICE_BLOCKS = 20
LIMITS = replace(builders.LIMITS, vocabulary=VOCABULARY)

_NONE: Mapping[int, tuple[int, PreemptMode]] = {}


def make_engine(blocks: int = DEVICE_BLOCKS, architecture: str = "llama") -> TorchEngine:
    return TorchEngine(describe(build_model(architecture)), kv_blocks=blocks, block_tokens=BLOCK_TOKENS)


class PrefixRig:
    """One worker's life. `config` None: no prefix cache."""

    def __init__(
        self, engine: TorchEngine, config: PrefixCacheConfig | None, *, host_blocks: int = 0
    ) -> None:
        self.engine = engine
        self.store: KvStore | None = None
        prefixes = None
        pool = BlockPool(engine.kv_blocks, engine.block_tokens)
        if config is not None:
            transfers = TransferEngine(lambda: None)
            self.store = open_store(config, engine, "worker-0", transfers, host_blocks=host_blocks)
            prefixes = Prefixes(self.store.cache, self.store.fingerprint, auditor=self.store.auditor)
        self.prefixes = prefixes
        self.core = core_of(pool if self.store is None else self.store.cache, prefixes, LIMITS)
        self.table = self.core._table
        self.hits: list[PrefixHit] = []
        self.prefilled_tokens = 0
        self.plans = 0
        self._names = 0

    def serve(
        self,
        prompts: Sequence[list[int]],
        *,
        max_tokens: int = 6,
        chunk: int = 8,
        salt: bytes = b"",
        preemptions: Mapping[int, tuple[int, PreemptMode]] = _NONE,
    ) -> list[list[int]]:
        """The answers, computed together; chunks are planned as if nothing were ever stored. `preemptions`:
        by number of the plan, which prompt's sequence starts again, and what becomes of its KV."""
        refs = []
        for _ in prompts:
            self._names += 1
            refs.append(ref(f"r{self._names}"))
        planned = dict.fromkeys(refs, 0)
        goals = {one: len(prompt) for one, prompt in zip(refs, prompts, strict=True)}
        first_plan = self.plans
        starts = tuple(
            spec(one, prompt, max_tokens=max_tokens, cache_salt=salt)
            for one, prompt in zip(refs, prompts, strict=True)
        )
        held: list[HeldSequence] = []
        while not held or any(sequence.alive for sequence in held):
            prefills, decodes = [], []
            preempted: list[Preemption] = []
            at, mode = preemptions.get(self.plans - first_plan, (0, PreemptMode.RECOMPUTE))
            if held and self.plans - first_plan in preemptions and self._alive(refs[at % len(refs)]):
                victim = refs[at % len(refs)]
                preempted.append(Preemption(ref=victim, mode=mode))
                planned[victim], goals[victim] = 0, self._tokens(victim)
            for one in refs:
                first = planned[one]
                if first < goals[one]:
                    end = planned[one] = min(goals[one], first + chunk)
                    prefills.append(prefill(one, first, end))
                elif held and self.table.find(one) in held and self._alive(one):
                    decodes.append(decode(one, -(-self._tokens(one) // BLOCK_TOKENS)))
            self.plans += 1
            message = plan(self.plans, starts=starts, prefills=tuple(prefills), decodes=tuple(decodes))
            self._run(msgspec.structs.replace(message, preemptions=tuple(preempted)), now_s=0.0)
            starts = ()
            held = [sequence for one in refs if (sequence := self.table.find(one)) is not None]
            assert len(held) == len(refs)
        return [sequence.tokens[sequence.prompt_tokens :] for sequence in held]

    def settle(self, within_s: float = 20.0) -> None:
        """Until nothing is being copied any more and nothing is left to save."""
        if self.store is None or self.prefixes is None:
            return
        deadline_s = time.monotonic() + within_s
        while True:
            self.store.transfers.settle()
            self.prefixes.work_ahead()
            if not self.store.transfers.open_copies and not self.store.cache._books.waiting[Tier.DISK]:
                self.store.transfers.settle()
                return
            assert time.monotonic() < deadline_s, "copies do not end"
            time.sleep(0.001)

    def check_integrity(self) -> None:
        self.settle()
        self.core.check_integrity()

    def close(self) -> None:
        if self.store is not None:
            assert self.store.close(20.0)

    def _run(self, message: BatchPlan, now_s: float) -> None:
        self.core.on_plan(message, now_s)
        if self.store is not None and self.prefixes is not None:
            self.store.transfers.settle()
            self.prefixes.work_ahead()
        work, effects = self.begin_step(now_s)
        while work is not None:
            rows: list[Row] = [row_of(item) for item in work.items]
            self.prefilled_tokens += work.prefilled_tokens
            began_s = time.perf_counter()
            sampled = self.engine.step(rows)
            done = self.core.finish_step(work, sampled, now_s, time.perf_counter() - began_s)
            self._note(done.stepped)
            work, effects = self.begin_step(now_s)
        self._note(effects.stepped)

    def begin_step(self, now_s: float) -> tuple[StepWork | None, StepEffects]:
        """The next iteration, if need be once the blocks are there that all wait for."""
        deadline_s = time.monotonic() + 20.0
        while True:
            work, effects = self.core.begin_step(now_s)
            if work is not None or not (self.core.is_held or self.table.put_off):
                return work, effects
            self._note(effects.stepped)
            assert self.store is not None and time.monotonic() < deadline_s, "loads do not end"
            time.sleep(0.0005)
            self.store.transfers.settle()

    def _note(self, stepped: Sequence[WorkerStepped]) -> None:
        for report in stepped:
            assert not report.skipped, report
            self.hits += report.hits

    def _alive(self, one: SequenceRef) -> bool:
        sequence = self.table.find(one)
        return sequence is not None and sequence.alive

    def _tokens(self, one: SequenceRef) -> int:
        sequence = self.table.find(one)
        assert sequence is not None
        return len(sequence.tokens)
