"""The engine in its own process, called directly, on the same core as the served one.

`python -m bench.live.overhead.direct` reads a JSON object per line (`prompts`, `output_tokens`,
`max_sequences`). It answers with one (`token_s`: for each prompt, the engine time until each token).
`DirectEngine` is the client.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.kit.cores import bind_threads
from bench.kit.processes import Child
from services.scheduler.policy.contract import BatchPolicy, PlannedBatch, PolicySettings, Task, WorkerShape
from services.scheduler.policy.first_come import VllmPolicy
from services.worker.core.sampling import SamplePoint
from services.worker.engine.contract import Engine, Row
from services.worker.kv.core.block_pool import BlockPool
from shared.errors import InternalError
from shared.messages.sequence import Sampling, SequenceKey

Clock = Callable[[], float]


@dataclass
class Timed:
    """One sequence, with the engine time in seconds until each of its tokens."""

    tokens: list[int]
    prompt_tokens: int
    token_s: list[float] = field(default_factory=list)
    computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)


def run_direct(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    output_tokens: int,
    max_sequences: int,
    clock: Clock = time.perf_counter,
) -> list[Timed]:
    """Return greedy answers of exactly `output_tokens` to prompts that arrive at once, in their order.

    Raises InternalError if the engine returns no token or the policy stops planning.
    """
    settings = PolicySettings(max_batch_sequences=max_sequences)
    policy = VllmPolicy(WorkerShape(engine.block_tokens, engine.kv_blocks), settings)
    calls = _Calls(engine, output_tokens, clock)
    for number, prompt in enumerate(prompts):
        key = (f"{number:06}", 0)
        calls.sequences[key] = Timed(list(prompt), len(prompt))
        policy.on_arrival(Task(key, len(prompt), output_tokens, 0.0), 0.0)
    while calls.unfinished:
        batch = policy.plan(0.0)
        if batch is None:
            raise InternalError("the policy plans nothing although sequences wait: give the engine more KV")
        calls.run(batch, policy)
    return list(calls.sequences.values())


class _Calls:
    """Executes batches."""

    def __init__(self, engine: Engine, output_tokens: int, clock: Clock) -> None:
        self._engine = engine
        self._output_tokens = output_tokens
        self._clock = clock
        self._pool = BlockPool(engine.kv_blocks, engine.block_tokens)
        self._sampling = Sampling(seed=0, max_tokens=output_tokens, temperature=0.0)
        self._spent_s = 0.0
        self.sequences: dict[SequenceKey, Timed] = {}

    @property
    def unfinished(self) -> bool:
        return any(len(one.token_s) < self._output_tokens for one in self.sequences.values())

    def run(self, batch: PlannedBatch, policy: BatchPolicy) -> None:
        """Run all steps of a batch; completed sequences leave the policy."""
        for preemption in batch.preemptions:
            self._free(self.sequences[preemption.key])
        for step in range(batch.steps):
            work = [
                (self._grown(prefill.key, prefill.allocated_blocks), prefill.end_token)
                for prefill in (batch.prefills if step == 0 else ())
            ]
            for decode in batch.decodes:
                if step < decode.tokens:
                    one = self._grown(decode.key, decode.allocated_blocks)
                    work.append((one, len(one.tokens)))
            self._step(work)
        for key in [*(item.key for item in batch.prefills), *(item.key for item in batch.decodes)]:
            if len(self.sequences[key].token_s) == self._output_tokens:
                self._free(self.sequences[key])
                policy.on_ended(key, 0.0)

    def _step(self, work: Sequence[tuple[Timed, int]]) -> None:
        rows = [self._row(one, end) for one, end in work]
        began_s = self._clock()
        sampled = self._engine.step(rows)
        self._spent_s += self._clock() - began_s
        for (one, end), row, token in zip(work, rows, sampled, strict=True):
            one.computed_tokens = end
            if row.point is not None:
                if token is None:
                    raise InternalError("the engine yields no token")
                one.tokens.append(token.token)
                one.token_s.append(self._spent_s)

    def _row(self, one: Timed, end: int) -> Row:
        first = one.computed_tokens
        point = None
        if end == len(one.tokens):
            point = SamplePoint(self._sampling, 0, end - one.prompt_tokens, one.tokens)
        return Row(one.tokens[first:end], first, one.blocks, point)

    def _grown(self, key: SequenceKey, blocks: int) -> Timed:
        one = self.sequences[key]
        one.blocks += self._pool.allocate(max(0, blocks - len(one.blocks)))
        return one

    def _free(self, one: Timed) -> None:
        self._pool.release(one.blocks)
        one.blocks, one.computed_tokens = [], 0


class DirectEngine(Child):
    """A running engine process."""

    def __init__(self, model: Path, core: int, kv_blocks: int) -> None:
        super().__init__("bench.live.overhead.direct", str(model), str(core), str(kv_blocks))

    def run(
        self, prompts: Sequence[Sequence[int]], output_tokens: int, max_sequences: int
    ) -> list[list[float]]:
        """Return the engine time in seconds until each token, for each prompt. Raises InternalError."""
        sizes = {"output_tokens": output_tokens, "max_sequences": max_sequences}
        return list(self.ask({"prompts": [list(prompt) for prompt in prompts], **sizes})["token_s"])


def main(model: str, core: str, kv_blocks: str) -> None:
    """Serve standard input until its end."""
    from services.worker.assembly import make_engine
    from services.worker.config import WorkerConfig

    bind_threads({int(core)})
    engine = make_engine(WorkerConfig(model=model, kv_blocks=int(kv_blocks), threads=1))
    for line in sys.stdin:
        question = json.loads(line)
        timed = run_direct(engine, question["prompts"], question["output_tokens"], question["max_sequences"])
        print(json.dumps({"token_s": [one.token_s for one in timed]}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
