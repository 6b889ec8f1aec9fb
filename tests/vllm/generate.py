"""In vLLM's environment: greedy answers of a checkpoint, by Kvasir's engine and by vLLM's own `LLM.generate`.

`python -m tests.vllm.generate FOLDER [RANKS [v1|v2 [cpu|cuda [DTYPE [ADAPTERS]]]]]` prints a JSON object of
`prompts`, `engine` (on so many ranks, by that model runner) and `vllm`, lists of token ids, and `embedded`,
what some prompts embed to; without `vllm` where V2 is interpreted. Where there is one rank, some steps break
off after the first half and are run again; `alone` and `in_flight` are answers of a worker's loop, one step
after the other and with tokens that stay on the device from step to step; `again` are those of `engine` in
the latter way. All prompts are answered by the model, then by each adapter in the folder ADAPTERS.
"""

import json
import os
import random
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from llguidance import LLMatcher

from services.worker.assembly import make_engine
from services.worker.config import WorkerConfig
from services.worker.core.sampling import SamplePoint
from services.worker.core.settings import VllmConfig
from services.worker.engine.contract import Engine, Row
from shared.messages.sequence import Sampling
from tests.services.worker.by_hand import Thread

LENGTHS = (5, 31, 32, 70, 130, 200)
ANSWER_TOKENS = 40
BLOCKS, CHUNK_TOKENS = 96, 48


def prompts(vocabulary: int) -> list[list[int]]:
    """Of all lengths, with tokens that are no special ones."""
    dice = random.Random(7)
    return [[1, *(dice.randrange(16, vocabulary) for _ in range(length - 1))] for length in LENGTHS]


class _Driven:
    def __init__(self, prompt: list[int], adapter: str) -> None:
        self.adapter = adapter
        self.prompt_tokens, self.tokens, self.computed = len(prompt), list(prompt), 0
        self.blocks: list[int] = []

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    def row(self, free: list[int], block_tokens: int) -> Row:
        end = min(len(self.tokens), self.computed + CHUNK_TOKENS)
        while len(self.blocks) * block_tokens < end:
            self.blocks.append(free.pop())
        sampling = Sampling(seed=0, max_tokens=ANSWER_TOKENS, temperature=0.0)
        point = SamplePoint(sampling, 0, end - self.prompt_tokens, self.tokens)
        tokens, asked = self.tokens[self.computed : end], point if end == len(self.tokens) else None
        return Row(tokens, self.computed, self.blocks, asked, adapter=self.adapter)


class Broken(Exception):
    """A step that was made to fail."""


def break_next(engine: Any) -> None:
    """The next step fails between the model and the sampler."""
    worker = engine._runner._steps._worker

    def fails(_: None) -> None:
        del worker.sample_tokens
        raise Broken

    worker.sample_tokens = fails


def break_off(engine: Any, rows: list[Row]) -> None:
    break_next(engine)
    try:
        engine.step(rows)
    except Broken:
        return
    raise AssertionError("the step did not fail")


def keep_tokens_on_the_device(engine: Any) -> None:
    """As vLLM does with `async_scheduling`, which it refuses on a CPU; its streams are stand-ins there."""
    runner = engine._runner._steps._runner
    if runner.device.type == "cpu" and engine._runner.kind == "v1":
        cuda: Any = torch.cuda
        runner.use_async_scheduling, runner.async_output_copy_stream = True, cuda.Stream()


def by_thread(engine: Any, *, overlaps: bool) -> dict[str, list[int]]:
    """In a worker's loop, by what is asked for; with steps in flight some fail."""
    numbers = LLMatcher.grammar_from_regex("([a-z]{1,9} [0-9]{1,4}, )+")
    engine._grammars.expect(numbers).result(60)
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "short": {"max_tokens": 7},
        "ending": {"end_token_ids": tuple(range(0, engine.vocabulary, 9))},
        "penalised": {"frequency_penalty": 0.6, "repetition_penalty": 1.3},
        "constrained": {"grammar": numbers, "end_token_ids": (2,)},
        "drawn": {"temperature": 0.8, "top_p": 0.9},
        "measured": {"top_logprobs": 2},
    }
    usual = {"seed": 3, "max_tokens": 28, "temperature": 0.0}
    engine.overlaps = overlaps
    thread = Thread(engine)
    thread.start({name: Sampling(**usual | way) for name, way in ways.items()}, prompt=40)
    for turn in range(60):
        if overlaps and turn in (5, 14, 15, 20):
            break_next(engine)
        thread.turn()
    assert not thread.broken and set(thread.ends()) == set(ways) and not thread.table.in_flight
    thread.store.close(10.0)
    return {name: thread.tokens(name) for name in ways}


def embedded(engine: Engine) -> list[str]:
    """Of prompts of one chunk, each in blocks of its own: fp32, base64."""
    rows, used = [], 0
    for prompt in prompts(engine.vocabulary)[:4]:
        blocks = list(range(used, used + -(-len(prompt) // engine.block_tokens)))
        used += len(blocks)
        sampling = Sampling(seed=0, max_tokens=1, temperature=0.0, top_logprobs=0, embeds=True)
        rows.append(Row(prompt, 0, blocks, SamplePoint(sampling, 0, 0, prompt)))
    found = []
    for sampled in engine.step(rows):
        assert sampled is not None and sampled.logprobs is not None and sampled.logprobs.hidden is not None
        found.append(b64encode(sampled.logprobs.hidden).decode())
    return found


def by_engine(engine: Engine, adapters: dict[str, str], *, breaks: bool) -> list[list[int]]:
    """Chunks and decodes mixed, blocks in any order, rows left out at random; `breaks`: some steps fail."""
    dice = random.Random(1)
    free = dice.sample(range(engine.kv_blocks), engine.kv_blocks)
    driven = [_Driven(prompt, name) for name in ("", *adapters) for prompt in prompts(engine.vocabulary)]
    while left := [each for each in driven if len(each.answer) < ANSWER_TOKENS]:
        chosen = [each for each in left if dice.random() < 0.8] or left
        rows = [each.row(free, engine.block_tokens) for each in chosen]
        if breaks and dice.random() < 0.1:
            break_off(engine, rows)
        for each, row, sampled in zip(chosen, rows, engine.step(rows), strict=True):
            each.computed += len(row.tokens)
            if row.point is not None:
                assert sampled is not None, "logits are not finite"
                each.tokens.append(sampled.token)
    return [each.answer for each in driven]


def by_vllm(folder: str, vocabulary: int, dtype: str, adapters: dict[str, str]) -> list[list[int]]:
    """Its own scheduler and sampler, all prompts at once."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    sizes: dict[str, Any] = {"block_size": 32, "kv_cache_memory_bytes": 64 << 20, "max_model_len": -1}
    if adapters:
        sizes |= {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": 16}
    llm: Any = LLM(folder, dtype=dtype, enforce_eager=True, **sizes)
    how = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts(vocabulary)]
    loras = [None, *(LoRARequest(name, at, adapters[name]) for at, name in enumerate(adapters, 1))]
    outputs = [each for lora in loras for each in llm.generate(asked, how, use_tqdm=False, lora_request=lora)]
    return [list(output.outputs[0].token_ids) for output in outputs]


def main() -> None:
    folder, ranks, runner, device, dtype, *own = [
        *sys.argv[1:],
        *("1", "v1", "cpu", "float32")[len(sys.argv) - 2 :],
    ]
    adapters = {path.name: str(path) for each in own for path in sorted(Path(each).iterdir())}
    how = {"tensor_parallel": ranks, "model_runner": runner, "adapters": adapters}
    settings = VllmConfig.model_validate(how)
    given = {"engine": "vllm", "model": folder, "kv_blocks": BLOCKS, "device": device, "dtype": dtype}
    config = WorkerConfig.model_validate({"instance": "worker-0", "vllm": settings, **given})
    engine: Any = make_engine(config)
    found: dict[str, Any] = {"prompts": prompts(engine.vocabulary)}
    found |= {"engine": by_engine(engine, adapters, breaks=ranks == "1"), "embedded": embedded(engine)}
    if ranks == "1":
        found["alone"] = by_thread(engine, overlaps=False)
        keep_tokens_on_the_device(engine)
        found["in_flight"] = by_thread(engine, overlaps=True)
        found["again"] = by_engine(engine, adapters, breaks=True)
    engine.close()
    if (runner, device) == ("v2", "cpu"):
        print(json.dumps(found))
        return
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
    print(json.dumps({**found, "vllm": by_vllm(folder, engine.vocabulary, dtype, adapters)}))


if __name__ == "__main__":
    main()
