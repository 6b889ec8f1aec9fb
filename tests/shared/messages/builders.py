"""Short ways to write messages that have many fields, where only a few matter."""

from typing import Any

import msgspec

from shared.messages.reports import Capacity, WorkerReported

_IDLE = WorkerReported(
    worker_id="worker-0",
    incarnation=1,
    seq=1,
    stepped_seq=0,
    epoch=1,
    plan_seq=0,
    model="m",
    block_tokens=16,
    max_context_tokens=160,
    capacity=Capacity(total_blocks=10, free_blocks=10),
)


def worker_report(worker_id: str = "worker-0", **fields: Any) -> WorkerReported:
    """The first heartbeat of a worker that does nothing, but for what is named."""
    return msgspec.structs.replace(_IDLE, worker_id=worker_id, **fields)
