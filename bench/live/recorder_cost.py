"""Cost of the flight recorder: CPU seconds per token of a stack with and without it.

Recording cannot be turned off. The other side starts with a `sitecustomize` on its path that replaces the
recorder's functions with empty ones before any import of ours; the bench checks that it records nothing.
Sides take turns with the same requests.
"""

import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.kit.context import Context
from bench.kit.load import full_answer, run_batch
from bench.kit.models import TINY_CHAT, drawn_tokens, vocabulary
from bench.kit.provenance import ROOT
from bench.kit.stacks import ONE_THREAD, Stack, start_stack
from bench.kit.stats import Work, alternate, ratio_of_wholes, with_interval
from shared.errors import InternalError
from shared.messages.sequence import SequenceRef
from shared.recorder import MOST_BATCHES, MOST_EVENTS, MOST_ROWS, Batch, Recorder

_DEADLINE_S = 240.0
_SETTINGS: Mapping[str, object] = {"worker.threads": 1, "worker.kv_blocks": 512}
_DEAF = '''\
"""Nothing is recorded: for `python -m bench explain`."""
import sys
sys.path.insert(0, {root!r})
from shared import recorder
sys.path.remove({root!r})
for name in ("note", "note_at", "file"):
    setattr(recorder.Recorder, name, lambda *args, **fields: None)
'''


def compare(context: Context, turns: int, requests: int) -> dict[str, float]:
    """Return `recorder_cost`, the additional CPU per token as a share, with its 95 % interval, and
    `recorder_full_mb`, the memory of a full recorder."""
    dice, ids = context.random("recorder"), vocabulary(TINY_CHAT)
    bodies = [full_answer(drawn_tokens(dice, ids, 64), 160) for _ in range(requests)]
    deaf = {**ONE_THREAD, "PYTHONPATH": str(_deaf_path(context.run_dir))}
    with (
        start_stack(context.run_dir / "recording", _SETTINGS, workers=2) as recording,
        start_stack(context.run_dir / "deaf", _SETTINGS, workers=2, environ=deaf) as silent,
    ):

        def side(stack: Stack) -> Callable[[], Work]:
            return lambda: _tokens_and_cpu_s(stack, bodies)

        for stack in (recording, silent):
            _tokens_and_cpu_s(stack, bodies)
        with_it, without = alternate([side(recording), side(silent)], turns)
        events = len(recording_of(silent))
        if events > 0:
            raise InternalError(f"the side that is not to record has recorded {events} events")
    for turn, (one, other) in enumerate(zip(with_it, without, strict=True)):
        context.record({"turn": turn, "recording": one, "deaf": other}, "recorder.jsonl")
    costs = with_interval("recorder_cost", without, with_it, ratio_of_wholes)
    return {name: value - 1.0 for name, value in costs.items()} | {"recorder_full_mb": full_bytes() / 1e6}


def _deaf_path(run_dir: Path) -> Path:
    folder = (run_dir / "without-recorder").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_DEAF.format(root=str(ROOT)))
    return folder


def _tokens_and_cpu_s(stack: Stack, bodies: list[dict[str, object]]) -> Work:
    before_s = sum(stack.cpu_s().values())
    answers = run_batch(stack.target, bodies, _DEADLINE_S)
    time.sleep(0.3)  # wait for acknowledged ends and logs
    failed = [answer.error for answer in answers if not answer.ok]
    if failed:
        raise InternalError(f"{len(failed)} of {len(bodies)} answers failed: {failed[0]}")
    return sum(answer.completion_tokens for answer in answers), sum(stack.cpu_s().values()) - before_s


def recording_of(stack: Stack) -> list[dict[str, object]]:
    """Return all events recorded by the stack's instances."""
    path = stack.run_dir / "recording.jsonl"
    argv = [sys.executable, "-m", "services", "record", "--run-dir", str(stack.run_dir), "--out", str(path)]
    subprocess.run(argv, cwd=ROOT, capture_output=True, check=True, timeout=_DEADLINE_S)
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def full_bytes() -> int:
    """Return the bytes of a recorder with the maximum of events, steps and rows, each with its own numbers
    as in a worker."""
    rows = [SequenceRef(request_id=f"req_{at:032x}", choice=0, attempt=1) for at in range(MOST_EVENTS)]
    each = MOST_ROWS // MOST_BATCHES
    tracemalloc.start()
    try:
        recorder = Recorder("bench", "bench-0", 1)
        for at, ref in enumerate(rows):
            found = {"tokens": 1000 + at, "device_blocks": 2000 + at, "host_blocks": 3000 + at}
            found["disk_blocks"] = 0
            recorder.note_at(0.1 * at, "found", ref.request_id, choice=0, attempt=1, **found)
        for at in range(MOST_BATCHES):
            fields = {"step_s": 0.1 * at, "busy_s": 0.2 * at, "plan": 1000 + at, "epoch": 1}
            fields["heard_s"] = 0.3 * at
            recorder.file(0.4 * at, "step", Batch([], [rows[at]] * each, fields))
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
