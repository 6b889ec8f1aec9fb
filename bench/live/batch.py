"""`python -m bench batch`: the latency of chats beside a batch, and whether all of the batch is done although
a gateway and a worker are killed.

The same chats run alone, beside a batch, and alone again. The kills come after the chats beside the batch.
"""

import json
import random
import time
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import uvloop

from bench.kit.context import Context
from bench.kit.load import Answer, serve_all
from bench.kit.outcome import Outcome, Table
from bench.kit.stacks import start_stack
from bench.kit.stats import percentile
from bench.live.chats import chat_bodies
from shared.errors import InternalError
from sim.workloads import poisson_times

if TYPE_CHECKING:  # the bench's own run imports it; the list of benches does without
    import openai
    from openai.types import BatchRequestCounts

ENGINES: Mapping[str, Mapping[str, object]] = {
    "simulated": {"worker.engine": "simulated", "worker.simulated.speed": 0.25},
    "tiny_chat": {"worker.threads": 1},
}
"""The simulated engine is slowed four times, so that its steps and not this machine's cores set the pace."""
_CHAT_TOKENS, _BATCH_TOKENS = 64, 128
_PATH: Final = "/v1/chat/completions"
_DEADLINE_S = 3600.0


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--engine", choices=ENGINES, default="simulated", help="[%(default)s]")
    parser.add_argument("--requests", type=int, help="in the batch [1000; --quick 60]")
    parser.add_argument("--rate", type=float, default=2.0, help="chats a second [%(default)g]")


def run(context: Context) -> Outcome:
    """Run the bench. Raises InternalError if the batch does not end."""
    arguments = context.arguments
    requests = arguments.requests or (60 if context.quick else 1000)
    chats = 40 if context.quick else 240
    settings = ENGINES[arguments.engine]
    with start_stack(context.run_dir / "stack", settings, workers=2, gateways=2, refuses=True) as stack:
        bodies = chat_bodies(chats, context.seed, _CHAT_TOKENS)
        gaps = poisson_times(random.Random(f"batch/{context.seed}"), arguments.rate)
        due_s = list(islice(gaps, chats))
        target = replace(stack.target, path=_PATH)
        parts: dict[str, list[Answer]] = {}

        def chat(part: str) -> None:
            context.say(f"{chats} chats {part}")
            parts[part] = list(uvloop.run(serve_all(target, bodies, chats, due_s=due_s)).answers)
            for each in parts[part]:
                context.record({"part": part, "seconds": each.ended_s - each.sent_s, "error": each.error})

        chat("alone")
        url = f"http://{target.host}:{target.port}/v1"
        import openai

        client = openai.OpenAI(base_url=url, api_key=target.key, max_retries=8)
        began_s = time.perf_counter()
        batch = _begin(client, target.model, chat_bodies(requests, context.seed + 1, _BATCH_TOKENS))
        chat("beside the batch")
        done_beside = _counts(client, batch).completed
        for name in ("gateway-0", "worker-1"):
            stack.process(name).kill()
        counts = _counts(client, batch, at_end=True)
        took_s = time.perf_counter() - began_s
        stack.until(lambda: all(stack.process(name) for name in ("gateway-0", "worker-1")), 60.0)
        chat("alone again")
    return outcome(parts, counts, done_beside, took_s)


def outcome(
    parts: Mapping[str, Sequence[Answer]], counts: "BatchRequestCounts", done_beside: int, took_s: float
) -> Outcome:
    """Return the figures of all parts, and of the batch."""
    alone = [*parts["alone"], *parts["alone again"]]
    beside = parts["beside the batch"]
    rows, figures = [], dict[str, float]()
    for name, which in (("end to end", _whole_s), ("first token", _first_s)):
        for at in (50, 99):
            apart_s, with_s = (percentile([which(one) for one in of if one.ok], at) for of in (alone, beside))
            rows.append((f"{name}, p{at}", 1000 * apart_s, 1000 * with_s, with_s / apart_s))
            figures[f"{name.replace(' ', '_')}_p{at}_ratio"] = with_s / apart_s
    figures |= {"batch_requests": counts.total, "batch_completed": counts.completed}
    figures |= {"batch_done_beside_chats": done_beside, "batch_s": took_s}
    failures = sum(not one.ok for part in parts.values() for one in part)
    return Outcome(
        figures,
        failures + counts.total - counts.completed,
        tables=[Table("chats, ms", ("", "alone", "beside the batch", "ratio"), rows)],
        notes=[
            "two gateways, two workers; after the chats beside the batch one of each is killed: the batch "
            "survives that if batch_done_beside_chats is below batch_requests"
        ],
    )


def _whole_s(answer: Answer) -> float:
    return answer.ended_s - answer.sent_s


def _first_s(answer: Answer) -> float:
    return answer.first_s


def _begin(client: "openai.OpenAI", model: str, bodies: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        {"custom_id": str(at), "method": "POST", "url": _PATH, "body": {"model": model, **body}}
        for at, body in enumerate(bodies)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=_PATH, completion_window="24h").id


def _counts(client: "openai.OpenAI", batch: str, *, at_end: bool = False) -> "BatchRequestCounts":
    """Return the progress of a batch, or what came of it. Raises InternalError at a deadline."""
    until_s = time.monotonic() + _DEADLINE_S
    while (found := client.batches.retrieve(batch)).status in ("validating", "in_progress") and at_end:
        if time.monotonic() > until_s:
            raise InternalError(f"the batch did not end within {_DEADLINE_S:.0f} s")
        time.sleep(0.5)
    assert found.request_counts is not None
    return found.request_counts
