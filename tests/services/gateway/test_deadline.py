"""How long a client waits: what it may say, what remains, and what happens when the time is over."""

import json

import pytest

from services.gateway.exchange import HEADER, Deadline, deadline_of
from shared.errors import InvalidRequest
from tests.patience import until
from tests.services.gateway.conftest import ANSWER, MakeStack, Stack

CHAT = "/v1/chat/completions"


def test_the_clients_word_counts_before_the_configurations() -> None:
    assert deadline_of("2.5", 60.0, 100.0, 7.0) == Deadline(7.0, 2.5)
    assert deadline_of(None, 60.0, 100.0, 7.0) == Deadline(7.0, 60.0)
    assert deadline_of(None, None, 100.0, 7.0).remaining_s() is None
    assert deadline_of("100", None, 100.0, 7.0).timeout_s == 100.0


@pytest.mark.parametrize("header", ["", "0", "-1", "soon", "nan", "inf", "100.1", "1e999", "1,5"])
def test_what_is_no_time_to_wait_is_refused_by_name(header: str) -> None:
    with pytest.raises(InvalidRequest, match="at most 100") as caught:
        deadline_of(header, 60.0, 100.0, 0.0)
    assert caught.value.param == HEADER


@pytest.mark.parametrize("stream", [False, True])
async def test_no_token_in_time_is_504_and_cancels(stack: Stack, stream: bool) -> None:
    stack.hold()
    body = {**stack.body, "stream": stream, "n": 2}
    reply = await stack.http.post(CHAT, json=body, headers={HEADER: "0.2"})
    assert reply.status_code == 504
    error = reply.json()["error"]
    assert (error["code"], error["type"]) == ("deadline_exceeded", "server_error")
    await until(lambda: {ref.choice for ref in stack.scheduler.cancelled} == {0, 1})
    await until(lambda: not any(worker.held for worker in stack.workers))
    waits_s = [spec.deadline_in_s for spec in stack.scheduler.submits]
    assert all(wait_s is not None and 0 < wait_s <= 0.2 for wait_s in waits_s)


async def test_after_the_first_token_it_is_an_event(stack: Stack) -> None:
    stack.pace(0.03)
    reply = await stack.http.post(CHAT, json={**stack.body, "stream": True}, headers={HEADER: "0.4"})
    assert reply.status_code == 200
    *events, done = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    *shown, last = [json.loads(event) for event in events]
    assert last["error"]["code"] == "deadline_exceeded"
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in shown)
    assert text and ANSWER.startswith(text)
    await until(lambda: not any(worker.held for worker in stack.workers))


async def test_the_configuration_sets_one_and_bounds_what_clients_ask_for(make_stack: MakeStack) -> None:
    stack = await make_stack(request_timeout_s=0.2, max_request_timeout_s=5.0)
    assert (await stack.http.post(CHAT, json=stack.body, headers={HEADER: "5"})).status_code == 200
    too_long = await stack.http.post(CHAT, json=stack.body, headers={HEADER: "6"})
    assert (too_long.status_code, too_long.json()["error"]["param"]) == (400, HEADER)
    stack.hold()
    assert (await stack.chat()).status_code == 504


async def test_waiting_for_a_first_worker_counts(make_stack: MakeStack) -> None:
    stack = await make_stack(wait_ready=False, served_name="another")
    body = {**stack.body, "model": "another"}
    reply = await stack.http.post(CHAT, json=body, headers={HEADER: "0.1"})
    assert reply.status_code == 504
