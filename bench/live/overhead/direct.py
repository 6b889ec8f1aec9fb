"""The engine in a process of its own, called directly, on the core that the served one has.

`python -m bench.live.overhead.direct` reads one JSON object a line (`prompts`, `output_tokens`,
`max_sequences`) and answers each with one (`token_s`: for each prompt, the engine time until each token).
`DirectEngine` is the other end of that pipe.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.kit.provenance import ROOT
from bench.live.overhead.schedule import run_direct
from shared.errors import InternalError

_END_DEADLINE_S = 10.0


class DirectEngine:
    """A running process. Use as a context manager: it ends with the block."""

    def __init__(self, model: Path, core: int, kv_blocks: int) -> None:
        argv = [sys.executable, "-m", "bench.live.overhead.direct", str(model), str(core), str(kv_blocks)]
        self._process = subprocess.Popen(
            argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> "DirectEngine":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def run(
        self, prompts: Sequence[Sequence[int]], output_tokens: int, max_sequences: int
    ) -> list[list[float]]:
        """For each prompt, the seconds of engine time until each of its tokens. Raises InternalError."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None or self._process.poll() is not None:
            raise InternalError("the engine's process has ended")
        question: dict[str, Any] = {"prompts": [list(prompt) for prompt in prompts]}
        question |= {"output_tokens": output_tokens, "max_sequences": max_sequences}
        print(json.dumps(question), file=stdin, flush=True)
        line = stdout.readline()
        if not line:
            raise InternalError("the engine's process ended without an answer: its error is above")
        token_s: list[list[float]] = json.loads(line)["token_s"]
        return token_s


def main(model: str, core: str, kv_blocks: str) -> None:
    """Serves standard input until its end."""
    from services.worker.assembly import make_engine
    from services.worker.config import WorkerConfig
    from services.worker.cores import bind_to

    bind_to([int(core)])
    engine = make_engine(WorkerConfig(model=model, kv_blocks=int(kv_blocks), threads=1))
    for line in sys.stdin:
        question = json.loads(line)
        timed = run_direct(engine, question["prompts"], question["output_tokens"], question["max_sequences"])
        print(json.dumps({"token_s": [one.token_s for one in timed]}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
