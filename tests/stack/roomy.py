"""What one worker says that holds all KV itself: what several that share theirs should say."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from tests.stack.client import Answer, Question
from tests.stack.running import running_stack


def roomy_answers(
    run_dir: Path, batches: Sequence[Sequence[Question]], *, kv_blocks: int = 256
) -> list[list[Answer]]:
    """The questions of a batch are asked at once, the batches in turn."""
    settings = (f"worker.kv_blocks={kv_blocks}", "worker.prefix_cache.enabled=false")
    with running_stack(run_dir, workers=1, settings=settings) as one:
        return [asyncio.run(one.client().ask_all(batch)) for batch in batches]
