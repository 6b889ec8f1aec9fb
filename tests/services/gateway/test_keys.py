"""Keys with a name, class, weight and quotas; and how long a client waits."""

import asyncio
import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.config import GatewayConfig
from services.gateway.core.quotas import Quota, Quotas, RateLimited
from services.gateway.exchange import HEADER, Deadline, deadline_of
from shared import key_file
from shared.config import load
from shared.errors import ConfigError, InvalidRequest
from shared.messages.sequence import ServiceClass, Tenant
from tests.patience import PATIENCE_S, until
from tests.services.gateway.conftest import ANSWER, KEY, MakeStack, Stack

DIGEST = hashlib.sha256(b"sk-a").hexdigest()
MINE = hashlib.sha256(KEY.encode()).hexdigest()


def loaded(keys: object) -> GatewayConfig:
    return load(GatewayConfig, "gateway", [f"--keys={json.dumps(keys)}"], {})


def test_a_key_has_a_class_and_a_weight_or_the_usual_ones() -> None:
    tenants = loaded({"team-a": {"sha256": DIGEST, "class": "guaranteed", "weight": 2}}).tenants()
    assert tenants == {DIGEST: Tenant(name="team-a", service_class=ServiceClass.GUARANTEED, weight=2.0)}
    assert loaded({"b": {"sha256": DIGEST}}).tenants()[DIGEST] == Tenant(name="b")


@pytest.mark.parametrize(
    ("options", "listed"),
    [
        ({"sha256": DIGEST, "class": "gold"}, "guaranteed, standard, sheddable"),
        ({"sha256": DIGEST, "quota": 5}, "class, max_concurrent, requests_per_minute, sha256"),
        ({"sha256": DIGEST, "weight": 0}, "0.01"),
        ({"sha256": "abc"}, "sha256"),
        ({}, "sha256"),
    ],
)
def test_what_is_not_known_stops_the_start_and_lists_what_is(options: object, listed: str) -> None:
    with pytest.raises(ConfigError, match=listed):
        loaded({"a": options})


def test_a_key_that_is_there_twice_is_refused() -> None:
    config = loaded({"a": {"sha256": DIGEST}, "b": {"sha256": DIGEST}})
    with pytest.raises(ConfigError, match="twice"):
        config.check()


async def test_a_key_without_a_name_is_told_apart_by_its_digest(make_stack: MakeStack) -> None:
    stack = await make_stack()
    assert (await stack.chat()).status_code == 200
    assert stack.scheduler.submits[0].tenant == Tenant(name=f"key-{MINE[:8]}")


async def test_keys_come_and_go_while_it_runs(make_stack: MakeStack, tmp_path: Path) -> None:
    """Added with a limit, revoked, and a file that is broken in between changes nothing."""
    file = tmp_path / "keys.json"
    stack = await make_stack(keys_file=str(file))
    key = key_file.add(file, "team-a", {"requests_per_minute": 2, "class": "sheddable"})

    async def status() -> int:
        body, headers = {**stack.body, "max_tokens": 1}, {"authorization": f"Bearer {key}"}
        reply = await stack.http.post("/v1/chat/completions", json=body, headers=headers)
        if reply.status_code == 429:
            error = reply.json()["error"]
            assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
            assert 1 <= int(reply.headers["retry-after"]) <= 31
        return reply.status_code

    async def until_it_is(expected: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while await status() != expected:
                await asyncio.sleep(0.05)

    await until_it_is(200)
    assert stack.scheduler.submits[-1].tenant == Tenant(name="team-a", service_class=ServiceClass.SHEDDABLE)
    assert [await status(), await status()] == [200, 429]
    assert (await stack.chat(max_tokens=1)).status_code == 200, "others have theirs"
    content = file.read_text()
    file.write_text("{")
    await asyncio.sleep(0.7)
    assert await status() == 429, "known as before"
    file.write_text(content)
    key_file.revoke(file, "team-a")
    await until_it_is(401)


async def test_what_goes_on_without_its_client_counts(make_stack: MakeStack) -> None:
    """Named answers are written when nobody reads them: they are among those at once, until they end."""
    keys = {"team-a": {"sha256": MINE, "max_concurrent": 1}}
    stack = await make_stack(api_key_sha256=(), keys=keys)
    stack.hold()
    asking = asyncio.create_task(
        stack.http.post("/v1/chat/completions", json=stack.body, headers={"Idempotency-Key": "mine"})
    )
    await until(lambda: stack.scheduler.submits)
    asking.cancel()
    await asyncio.sleep(0.3)
    assert (await stack.chat()).status_code == 429
    stack.hold(is_held=False)
    async with asyncio.timeout(PATIENCE_S):
        while (await stack.chat()).status_code != 200:
            await asyncio.sleep(0.05)


OWNER = "digest"


def test_so_many_at_once() -> None:
    quotas = Quotas({OWNER: Quota(max_concurrent=2)})
    quotas.begin(OWNER, 0.0)
    quotas.begin(OWNER, 0.0)
    with pytest.raises(RateLimited, match="2 requests with this key are being answered"):
        quotas.begin(OWNER, 0.0)
    quotas.begin("another", 0.0)
    quotas.end(OWNER, 5, 1.0)
    quotas.begin(OWNER, 1.0)
    assert quotas.active(OWNER) == 2


def test_tokens_are_counted_when_an_answer_ends() -> None:
    quotas = Quotas({OWNER: Quota(tokens_per_minute=60)})
    quotas.begin(OWNER, 0.0)
    quotas.end(OWNER, 90, 0.0)
    with pytest.raises(RateLimited, match="60 tokens per minute") as caught:
        quotas.begin(OWNER, 0.0)
    assert caught.value.retry_after_s == pytest.approx(31.0)
    quotas.begin(OWNER, 31.0)


@given(per_minute=st.floats(0.5, 120), gaps_s=st.lists(st.floats(0, 40), min_size=1, max_size=60))
def test_requests_never_exceed_a_minutes_worth_and_the_rate(per_minute: float, gaps_s: list[float]) -> None:
    """In any stretch; and who waits as told gets in."""
    quotas, now_s, taken = Quotas({OWNER: Quota(requests_per_minute=per_minute)}), 0.0, []
    for gap_s in gaps_s:
        now_s += gap_s
        try:
            quotas.begin(OWNER, now_s)
        except RateLimited as refused:
            assert refused.retry_after_s is not None and refused.retry_after_s > 0
            now_s += refused.retry_after_s + 1e-6
            quotas.begin(OWNER, now_s)
        taken.append(now_s)
        quotas.end(OWNER, 0, now_s)
    for first, began_s in enumerate(taken):
        for last in range(first, len(taken)):
            most = max(1.0, per_minute) + (taken[last] - began_s) * per_minute / 60
            assert last - first + 1 <= most + 1e-3


def test_a_new_quota_holds_from_then_on_and_what_runs_is_counted() -> None:
    quotas = Quotas({OWNER: Quota(max_concurrent=5)})
    for _ in range(3):
        quotas.begin(OWNER, 0.0)
    quotas.replace({OWNER: Quota(max_concurrent=3)})
    with pytest.raises(RateLimited):
        quotas.begin(OWNER, 0.0)
    quotas.replace({})
    for _ in range(3):
        quotas.end(OWNER, 1, 0.0)
    assert quotas.active(OWNER) == 0


def test_an_answer_that_began_before_any_quota_frees_no_place_by_its_end() -> None:
    quotas = Quotas({OWNER: Quota(max_concurrent=1)})
    quotas.end(OWNER, 5, 0.0)
    quotas.begin(OWNER, 0.0)
    with pytest.raises(RateLimited):
        quotas.begin(OWNER, 0.0)


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
