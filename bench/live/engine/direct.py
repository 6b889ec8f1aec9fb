"""Our engine against transformers' continuous batching, both called directly on one thread.

No HTTP, bus or scheduler on either side: prompts in, greedy tokens out. `--peer vllm` compares servers.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from bench.kit.cells import CELLS_FILE
from bench.kit.context import Context
from bench.kit.cores import Cores
from bench.kit.turns import order_of
from bench.live.engine.duel import BatchCell, bodies
from bench.live.engine.served import GIB, MAX_CONTEXT_TOKENS
from services.worker.assembly import make_engine
from services.worker.config import WorkerConfig
from services.worker.core.sampling import Sampled, SamplePoint
from services.worker.engine.contract import Row
from shared.errors import InternalError
from shared.messages.sequence import Sampling

_PAGE_TOKENS = 32
_DEADLINE_S = 600.0
_PREFILL_TOKENS = 512
"""Prefill tokens per step on our side, as from the scheduler."""

Generate = Callable[[Sequence[list[int]], int], int]
"""Answers all prompts with the given number of tokens each; returns the total."""


class OurSide:
    """A worker's engine, fed as by the scheduler: chunked prefill, then decodes of the whole batch."""

    def __init__(self, model: Path, kv_gib: int) -> None:
        config = WorkerConfig(model=str(model), threads=1, kv_bytes=kv_gib * GIB)
        self._engine = make_engine(config)
        self._block_tokens = config.block_tokens

    def generate(self, prompts: Sequence[list[int]], output_tokens: int) -> int:
        """Implements `Generate`. Raises InternalError if the prompts do not fit into the KV."""
        per_sequence = -(-(max(map(len, prompts)) + output_tokens) // self._block_tokens)
        if per_sequence * len(prompts) > self._engine.kv_blocks:
            raise InternalError("the KV is too small for this workload: raise --kv-gib")
        tables = [list(range(at * per_sequence, (at + 1) * per_sequence)) for at in range(len(prompts))]
        sampling = Sampling(seed=0, max_tokens=output_tokens, temperature=0.0)
        sequences = [list(prompt) for prompt in prompts]
        for sequence, table in zip(sequences, tables, strict=True):
            self._prefill(sequence, table, sampling)
        for index in range(1, output_tokens):
            rows = [
                Row([sequence[-1]], len(sequence) - 1, table, SamplePoint(sampling, 0, index, sequence))
                for sequence, table in zip(sequences, tables, strict=True)
            ]
            for sequence, sampled in zip(sequences, self._engine.step(rows), strict=True):
                sequence.append(_token(sampled))
        return sum(len(all_) - len(own) for all_, own in zip(sequences, prompts, strict=True))

    def _prefill(self, sequence: list[int], table: list[int], sampling: Sampling) -> None:
        for first in range(0, len(sequence), _PREFILL_TOKENS):
            chunk = sequence[first : first + _PREFILL_TOKENS]
            last = first + len(chunk) == len(sequence)
            point = SamplePoint(sampling, 0, 0, sequence) if last else None
            (sampled,) = self._engine.step([Row(chunk, first, table, point)])
        sequence.append(_token(sampled))


class TransformersSide:
    """transformers' continuous batching with the same bytes of KV."""

    def __init__(self, model: Path, kv_gib: int) -> None:
        logging.getLogger("transformers").setLevel(logging.ERROR)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
        config = loaded.config
        per_token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        batching = ContinuousBatchingConfig(
            page_size=_PAGE_TOKENS,
            num_blocks=kv_gib * GIB // (per_token * _PAGE_TOKENS),
            max_batch_tokens=MAX_CONTEXT_TOKENS,
            allow_block_sharing=False,
        )
        # An end token that never occurs, so that answers have their full length.
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)  # type: ignore[no-untyped-call]
        self._manager = loaded.init_continuous_batching(
            generation_config=greedy, continuous_batching_config=batching
        )
        self._manager.start()

    def generate(self, prompts: Sequence[list[int]], output_tokens: int) -> int:
        """Implements `Generate`. Raises InternalError if an answer is missing."""
        self._manager.add_requests(inputs=[list(prompt) for prompt in prompts], max_new_tokens=output_tokens)
        tokens, deadline_s = 0, time.monotonic() + _DEADLINE_S
        for at in range(len(prompts)):
            answer = self._manager.get_result(timeout=max(0.0, deadline_s - time.monotonic()))
            if answer is None or answer.error is not None:
                raise InternalError(f"transformers answered {at} of {len(prompts)} prompts")
            tokens += len(answer.generated_tokens)
        return tokens

    def close(self) -> None:
        """Stop its thread."""
        self._manager.stop(block=True, timeout=_DEADLINE_S)


def run_direct(
    context: Context, model: Path, turns: Sequence[tuple[int, BatchCell]], cores: Cores, vocabulary: int
) -> int:
    """Run the turns, with a row per cell and side in `cells.jsonl`; return how many --budget-s left out."""
    cores.bind_engine()
    torch.set_num_threads(1)
    kv_gib = context.arguments.kv_gib
    ours, theirs = OurSide(model, kv_gib), TransformersSide(model, kv_gib)
    sides: dict[str, Generate] = {"kvasir": ours.generate, "transformers": theirs.generate}
    try:
        for generate in sides.values():
            generate([list(range(16, 48))] * 2, 4)
        cores.bind_engine()  # includes threads started since
        return _turns(context, turns, sides, vocabulary)
    finally:
        theirs.close()


def _turns(
    context: Context, turns: Sequence[tuple[int, BatchCell]], sides: dict[str, Generate], vocabulary: int
) -> int:
    """Run the turns; return how many were left out."""
    began_s = time.monotonic()
    with context.progress("alternations × workloads", len(turns)) as progress:
        for done, (alternation, cell) in enumerate(turns):
            if time.monotonic() - began_s > context.arguments.budget_s:
                return len(turns) - done
            rounds = bodies(cell, vocabulary, context.random(f"{alternation}/{cell.name}"))
            for at in order_of(alternation, len(sides)):
                name = list(sides)[at]
                row = _timed(sides[name], cell, rounds)
                context.record(
                    {"alternation": alternation, "cell": cell.name, "side": name, **row}, CELLS_FILE
                )
            progress.advance(now=cell.name)
    return 0


def _timed(generate: Generate, cell: BatchCell, rounds: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    began_s = time.perf_counter()
    tokens = sum(generate([body["prompt"] for body in batch], cell.output_tokens) for batch in rounds)
    wall_s = time.perf_counter() - began_s
    return {"wall_s": wall_s, "tok_s": tokens / wall_s, "failures": int(tokens != cell.tokens)}


def _token(sampled: Sampled | None) -> int:
    if sampled is None or sampled.token < 0:
        raise InternalError("our engine sampled nothing")
    return sampled.token
