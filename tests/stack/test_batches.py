"""A batch through the real OpenAI client: it survives its gateway and a worker, and gives way to chats."""

import json
import signal
import time

import pytest
from openai import OpenAI

from tests.stack.running import RunningStack

pytestmark = pytest.mark.stack
LINES, BAD = 60, 3


def requests() -> bytes:
    lines = []
    for number in range(LINES):
        body = {
            "model": "tiny_chat" if number != BAD else "another",
            "messages": [{"role": "user", "content": f"Tell me of {number} ships."}],
            "max_tokens": 40,
            "seed": number,
        }
        url = "/v1/chat/completions"
        lines.append(json.dumps({"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}))
    return "\n".join(lines).encode()


def test_a_batch_ends_whole_though_its_gateway_and_a_worker_die(simulated: RunningStack) -> None:
    client = OpenAI(base_url=f"{simulated.url}/v1", api_key=simulated.key, max_retries=8)
    file = client.files.create(file=("in.jsonl", requests()), purpose="batch")
    begun = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"why": "a test"},
    )
    simulated.signal("worker-1", signal.SIGKILL)
    simulated.signal("gateway-0", signal.SIGKILL)
    deadline_s = time.monotonic() + 120
    while (batch := client.batches.retrieve(begun.id)).status in ("validating", "in_progress"):
        assert time.monotonic() < deadline_s, batch
        time.sleep(0.3)
    counts = batch.request_counts
    assert counts is not None
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", LINES, LINES - 1, 1)
    assert batch.metadata == {"why": "a test"}
    assert batch.output_file_id is not None and batch.error_file_id is not None
    answers = [json.loads(text) for text in client.files.content(batch.output_file_id).text.splitlines()]
    assert [each["custom_id"] for each in answers] == [f"r{n}" for n in range(LINES) if n != BAD]
    assert all(each["response"]["body"]["choices"][0]["message"]["content"] for each in answers)
    (failed,) = client.files.content(batch.error_file_id).text.splitlines()
    assert json.loads(failed)["response"]["status_code"] == 404
    assert begun.id in [each.id for each in client.batches.list().data]
    assert client.files.delete(file.id).deleted
