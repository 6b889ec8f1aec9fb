"""An engine's thread that a test turns by hand: a worker's core, KV and loop around any engine."""

from collections.abc import Sequence

from msgspec.structs import replace

from services.worker.core.drafts import Drafts
from services.worker.core.prefixes import Prefixes
from services.worker.core.reports import Identity
from services.worker.core.sequences import SequenceLimits, SequenceTable
from services.worker.core.settings import PrefixCacheConfig
from services.worker.core.steps import StepCore, StepEffects
from services.worker.door import Door
from services.worker.engine.contract import Engine
from services.worker.engine_thread import Runner
from services.worker.kv.core.borrowed_pool import ExtendedPool
from services.worker.kv.store import CacheableEngine, open_store
from services.worker.kv.transfers import TransferEngine
from shared.clock import monotonic_s
from shared.errors import CreditorLost
from shared.messages.plans import BatchPlan
from shared.messages.sequence import FinishReason, Sampling
from tests.shared.messages.builders import decode, plan, prefill, ref, spec


class Thread:
    """An engine's thread, turned by hand."""

    def __init__(
        self,
        engine: Engine,
        *,
        cached: bool = True,
        borrowed: Sequence[int] = (),
        drafts: Drafts | None = None,
    ) -> None:
        assert isinstance(engine, CacheableEngine)
        self.engine = engine
        self.store = open_store(PrefixCacheConfig(), engine, "test", TransferEngine(lambda: None))
        prefixes = Prefixes(self.store.cache, self.store.fingerprint) if cached else None
        limits = SequenceLimits(200, engine.vocabulary, 60.0, 60.0)
        pool = ExtendedPool(self.store.cache, self.store.cache.ids) if borrowed else None
        if pool is not None:
            pool.admit(borrowed)
        self.table = SequenceTable(pool or self.store.cache, limits, prefixes)
        self.core = StepCore(Identity("worker-0", 1, "model", 200, "host"), self.table, drafts=drafts)
        self.effects: list[StepEffects] = []
        self.door = Door(self.core, monotonic_s, self.effects.append)
        self.broken: list[BaseException] = []
        self.runner = Runner(self.door, engine, on_broken=self.broken.append, lost_blocks=self.lost_blocks)
        self.lost: set[int] = set()
        self.seq = 0

    def lost_blocks(self, error: CreditorLost) -> set[int]:
        return self.lost

    def send(self, batch: BatchPlan) -> None:
        self.seq += 1
        batch = replace(batch, seq=self.seq, valid_for_s=1e6)
        self.door.post(lambda core, now_s: core.on_plan(batch, now_s), settles=False)
        self.door.run_waiting(0.0)

    def turn(self, turns: int = 1) -> None:
        for _ in range(turns):
            if self.core.has_plans or self.runner._flight is not None:
                self.runner.turn()
                self.core.check_integrity()

    def turn_until_the_end(self, name: str) -> None:
        for _ in range(60):
            if name not in self.ends():
                self.turn()
        assert name in self.ends()

    def start(self, samplings: dict[str, Sampling], prompt: int = 6, steps: int = 30) -> None:
        refs = [ref(name) for name in samplings]
        prompts = [[5 + (at * 7 + row) % 40 for at in range(prompt + row)] for row in range(len(refs))]
        blocks = -(-(prompt + len(refs) + steps + 1) // self.engine.block_tokens)
        self.send(
            plan(
                1,
                steps=steps,
                starts=tuple(
                    replace(spec(each, tokens), sampling=sampling)
                    for each, tokens, sampling in zip(refs, prompts, samplings.values(), strict=True)
                ),
                prefills=tuple(
                    prefill(each, 0, len(tokens), blocks) for each, tokens in zip(refs, prompts, strict=True)
                ),
                decodes=tuple(decode(each, blocks) for each in refs),
            )
        )

    def tokens(self, name: str) -> list[int]:
        deltas = [d for e in self.effects for f in e.frames for d in f.frame.deltas if d.request_id == name]
        found: list[int] = []
        for delta in deltas:
            assert delta.first_index == len(found), "a token came twice, or is missing"
            found += delta.tokens
        return found

    def ends(self) -> dict[str, FinishReason]:
        ended = [end for e in self.effects for s in e.stepped for end in s.ended]
        assert len({end.ref for end in ended}) == len(ended), "an end was reported twice"
        return {end.ref.request_id: end.finish_reason for end in ended}
