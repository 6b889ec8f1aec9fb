"""`python -m bench host`: the host's work for a token, where the model costs nothing.

First the engine's thread alone, from a plan at its door to sent frames (`bench.micro.engine_host`). Then a
stack whose steps take no time: tokens per second, and the processor time of each process for a token.
"""

import time
from argparse import ArgumentParser
from collections.abc import Mapping

import torch
import uvloop

from bench.kit.context import Context
from bench.kit.load import first_error, full_answer, serve_all
from bench.kit.models import TINY_CHAT, drawn_tokens, vocabulary
from bench.kit.outcome import Outcome, Table
from bench.kit.stacks import Stack, start_stack
from bench.micro.engine_host import CASES, thread_us_per_row
from services.worker.engine.loading import load
from shared.errors import InternalError

SETTINGS: Mapping[str, object] = {
    "worker.engine": "simulated",
    "worker.simulated.speed": 100_000,
    "worker.kv_blocks": 16_384,
    "scheduler.max_batch_sequences": 256,
    "scheduler.token_budget": 8_192,
}
_SHOWN = ("gateway", "scheduler", "placement", "predictor")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 128], help="at once [%(default)s]")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of each prompt [%(default)s]")
    parser.add_argument("--output-tokens", type=int, default=128, help="of each answer [%(default)s]")
    parser.add_argument("--answers", type=int, help="of a load [4096, quick: 512]; one stream: a 16th")


def run(context: Context) -> Outcome:
    """Run the bench. Raises InternalError if a request fails."""
    streams, plans = context.arguments.streams, 6 if context.quick else 24
    torch.set_num_threads(1)
    model = load(str(TINY_CHAT), dtype="float32", device="cpu")
    figures = {
        name: thread_us_per_row(model, rows, chunk_tokens=chunk, plans=plans)
        for name, (rows, chunk) in CASES.items()
    }
    with start_stack(context.run_dir / "stack", SETTINGS) as stack:
        spent_us = {count: carry(context, stack, count, figures) for count in streams}
    for count in streams:
        for part in _SHOWN:
            spent = (us for name, us in spent_us[count].items() if name.startswith(part))
            figures[f"{part}_us_per_token_b{count}"] = sum(spent)
    rows = [(name, *(spent_us[count].get(name, 0.0) for count in streams)) for name in spent_us[streams[0]]]
    columns = ("process", *(f"{count} streams" for count in streams))
    return Outcome(figures, 0, [Table("processor time, µs for an answer token", columns, rows)])


def carry(context: Context, stack: Stack, streams: int, figures: dict[str, float]) -> dict[str, float]:
    """Serve a load on so many streams; add its figures. Return the microseconds of processor time per answer
    token, by process, `client` included. Raises InternalError if a request fails."""
    flags, ids, dice = context.arguments, vocabulary(TINY_CHAT), context.random(f"{streams} streams")
    answers = flags.answers or (512 if context.quick else 4096)
    answers = max(4, answers // 16) if streams == 1 else answers
    prompts = [drawn_tokens(dice, ids, flags.prompt_tokens) for _ in range(answers + streams)]
    bodies = [full_answer(prompt, flags.output_tokens) for prompt in prompts]
    uvloop.run(serve_all(stack.target, bodies[:streams], streams))  # warms up
    before = {**stack.cpu_s(), "client": time.process_time()}
    found = uvloop.run(serve_all(stack.target, bodies[streams:], streams))
    after = {**stack.cpu_s(), "client": time.process_time()}
    if found.failures:
        raise InternalError(f"{found.failures} requests failed: {first_error(found.answers)}")
    tokens = sum(answer.completion_tokens for answer in found.answers)
    figures[f"stack_tok_s_b{streams}"] = tokens / found.elapsed_s
    # below 1: the gateway was behind, and joined tokens of a stream
    figures[f"events_per_token_b{streams}"] = sum(len(one.event_s) for one in found.answers) / tokens
    return {name: (after[name] - before.get(name, 0.0)) / tokens * 1e6 for name in after}
