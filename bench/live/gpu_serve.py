"""`python -m bench gpu --serve`: our stack against bare `vllm serve` on one device, one after the other.

Both have their defaults. Ours has one worker, and requests wait there instead of being refused.
"""

import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import uvloop

from bench.kit.context import CELLS_FILE, Context
from bench.kit.load import Answer, check, first_error, full_answer, serve_all
from bench.kit.models import checkpoint, drawn_tokens, vocabulary
from bench.kit.outcome import Outcome
from bench.kit.peers import start_bare_vllm, vllm_serve
from bench.kit.stacks import Server, start_stack
from bench.micro.gpu.activity import Activity
from shared.errors import ConfigError, KvasirError

_MEASURED = ("tok_s", "ttft_ms", "client_share", "kernel_share", "busy_share")


def run(context: Context) -> Outcome:
    """Run the bench. Raises ConfigError for an unknown model, InternalError if our stack does not start."""
    flags, activity, end_s = context.arguments, Activity(), time.monotonic() + context.arguments.budget_s
    model, dtype = checkpoint(flags.model), "float32" if flags.device == "cpu" else "bfloat16"
    folder, settings = context.run_dir.resolve(), {"worker.device": flags.device, "worker.dtype": dtype}
    starts: list[Any] = [partial(start_stack, folder / "kvasir", settings, model=model, environ={})]
    notes, rows = [activity.trouble] if activity.trouble else [], list[dict[str, Any]]()
    try:
        vllm_serve(flags.device)
        starts.append(partial(start_bare_vllm, folder, model, flags.device, dtype))
    except ConfigError as error:
        notes.append(f"only our stack is measured: {error}")
    context.say("\n".join([*notes, "our stack starts"]))
    for start in starts:
        try:
            with start(within_s=end_s - time.monotonic()) as served:
                for streams in flags.streams:
                    rows.append(_carried(context, served, streams, vocabulary(model), activity, end_s))
                    context.record(rows[-1], CELLS_FILE)
        except KvasirError as error:
            if start is starts[0]:
                raise
            notes.append(str(error))
    notes += [f"{row['side']}: {row['error']}" for row in rows if row["error"]]
    failures = sum(row["failures"] for row in rows) + len(starts) * len(flags.streams) - len(rows)
    return Outcome(figures(rows), failures, notes=[f"{model.name} in {dtype}", *notes])


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return ours over theirs, how busy 128 streams of ours keep the device, and all that was measured."""
    told = {f"{name}_b{row['streams']}_{row['side']}": row[name] for row in rows for name in _MEASURED}
    made = {"device_busy_share": told.get("busy_share_b128_kvasir", 0.0)}
    for streams in dict.fromkeys(row["streams"] for row in rows):
        for name, ratio in (("tok_s", "served_ratio"), ("ttft_ms", "ttft_ratio")):
            ours, theirs = (told.get(f"{name}_b{streams}_{side}") for side in ("kvasir", "vllm"))
            made[f"{ratio}_b{streams}"] = ours / theirs if ours and theirs else 0.0
    return {name: value for name, value in (made | told).items() if value}


def _carried(
    context: Context, served: Server, streams: int, ids: int, activity: Activity, end_s: float
) -> dict[str, Any]:
    """Return medians over loads, after one that warms up. Both sides get the same prompts."""
    prompt, output, loads = (64, 16, 1) if context.quick else (512, 128, 3)
    dice, found, answers = context.random(f"{streams} streams"), list[tuple[float, ...]](), list[Answer]()
    for requests in (streams, *[max(8, 2 * streams)] * loads):
        bodies = [full_answer(drawn_tokens(dice, ids, prompt), output) for _ in range(requests)]
        activity.shares()
        client_s, left_s = time.process_time(), max(0.0, end_s - time.monotonic())
        load = uvloop.run(serve_all(served.target, bodies, streams, until_s=left_s))
        client_s, shares = time.process_time() - client_s, activity.shares()
        tokens = sum(one.completion_tokens for one in load.answers if one.ok)
        ttft_s = statistics.median([one.first_s for one in load.answers if one.ok and one.event_s] or [0.0])
        found.append((tokens / load.elapsed_s, 1e3 * ttft_s, client_s / load.elapsed_s, *shares))
        answers += load.answers
    medians = dict(zip(_MEASURED, map(statistics.median, zip(*found[1:], strict=True)), strict=True))
    told = {"failures": check(answers, output), "error": first_error(answers), "loads": found[1:]}
    return {"side": served.name, "streams": streams, **medians, **told}
