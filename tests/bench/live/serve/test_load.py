"""One cell's load against a real HTTP server on a socket, and what is made of the answers."""

import asyncio
import threading
import time
from collections.abc import Iterator

import orjson
import pytest

from bench.kit.load import Answer, Target
from bench.live.serve.load import Asked, Level, ask_all, ask_at_rate, body_of, measure


class Echo:
    """Answers each prompt with as many tokens as its first id says, and remembers what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        self.busy = self.most_busy = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = orjson.loads(await reader.readexactly(length))
        self.bodies.append(body)
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        await asyncio.sleep(0.01)
        self.busy -= 1
        tokens = body["prompt"][0]
        events = [{"choices": [{"text": "x", "finish_reason": None}]} for _ in range(tokens)]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": tokens}
        lines = [*(orjson.dumps(one) for one in (*events, {"choices": [], "usage": usage})), b"[DONE]"]
        text = b"".join(b"data: " + line + b"\n\n" for line in lines)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text)
        await writer.drain()
        writer.close()


@pytest.fixture
def echo() -> Iterator[tuple[Echo, Target]]:
    """In a thread of its own: the client has an event loop of its own too."""
    served, loop, ready = Echo(), asyncio.new_event_loop(), threading.Event()
    ports: list[int] = []
    over = asyncio.Event()

    async def run() -> None:
        async with await asyncio.start_server(served.serve, "127.0.0.1", 0) as server:
            ports.append(server.sockets[0].getsockname()[1])
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    assert ready.wait(60)
    yield served, Target(ports[0], "m")
    loop.call_soon_threadsafe(over.set)
    thread.join(60)
    loop.close()


def test_requests_tell_nothing_of_lengths(echo: tuple[Echo, Target]) -> None:
    served, target = echo
    asked = ask_at_rate(target, [[3, 1], [5]], [3, 5], requests=4, rate_per_s=200.0, max_tokens=9, seed="a")
    assert [one.true_tokens for one in asked] == [one.answer.completion_tokens for one in asked]
    assert {tuple(sorted(body)) for body in served.bodies} == {
        ("max_tokens", "model", "prompt", "stream", "stream_options", "temperature")
    }
    assert {body["max_tokens"] for body in served.bodies} == {9}
    made = measure(asked, None)
    assert (made.requests, made.failures, made.same_length, made.attained) == (4, 0, 1.0, None)


def test_arrivals_do_not_wait_for_answers(echo: tuple[Echo, Target]) -> None:
    served, target = echo
    began_s = time.perf_counter()
    asked = ask_at_rate(target, [[1]], [1], requests=60, rate_per_s=2000.0, max_tokens=1, seed="a")
    assert time.perf_counter() - began_s < 5
    assert served.most_busy > 1
    assert all(not one.answer.error for one in asked)
    assert asked[0].row()["total_ms"] > 0


def test_answers_come_in_the_order_of_the_prompts(echo: tuple[Echo, Target]) -> None:
    _, target = echo
    answered = ask_all(target, [[4], [1], [2]], 9)
    assert [one.completion_tokens for one in answered] == [4, 1, 2]


def asked_of(planned_s: float, first_s: float, ended_s: float, tokens: int, **known: object) -> Asked:
    answer = Answer(planned_s, [first_s], ended_s, tokens, prompt_tokens=2, **known)  # type: ignore[arg-type]
    return Asked(0, planned_s, tokens, answer)


def test_latencies_count_from_the_plan_and_failures_in_none() -> None:
    late = asked_of(0.0, 1.0, 3.0, 5)
    late.answer.sent_s = 0.5
    made = measure([late, asked_of(1.0, 1.5, 2.5, 2), asked_of(1.0, 9.0, 9.0, 0, error="no")], None)
    assert (made.requests, made.failures, made.error) == (3, 1, "no")
    assert made.wall_s == 9.0
    assert made.tok_s == pytest.approx(7 / 9)
    assert made.normalized_ms == pytest.approx((3000 / 5 + 1500 / 2) / 2)
    assert made.ttft_ms_p50 == pytest.approx(750)
    assert made.itl_ms_p50 == pytest.approx((500 + 1000) / 2)
    assert made.late_ms_max == pytest.approx(500)


def test_a_level_is_kept_by_the_true_length_and_by_no_failure() -> None:
    level = Level(prefill_s=0.5, token_s=0.1, scale=2.0)
    assert level.limit_s(5) == pytest.approx(2.0)
    on_time, too_late = asked_of(0.0, 1.0, 2.0, 5), asked_of(0.0, 1.0, 2.01, 5)
    failed = asked_of(0.0, 0.1, 0.1, 5, error="no")
    made = measure([on_time, too_late, failed, failed], level)
    assert (made.attained, made.attained_first) == (0.25, 1.0)


def test_when_everything_fails_there_are_figures_still() -> None:
    made = measure([asked_of(0.0, 0.1, 0.1, 5, error="no")], Level(1, 1, 2))
    assert (made.failures, made.normalized_ms, made.ttft_ms_p50, made.attained) == (1, 0.0, 0.0, 0.0)


def test_a_body_is_greedy_with_the_same_limit() -> None:
    assert body_of((1, 2), 7) == {"prompt": [1, 2], "max_tokens": 7, "temperature": 0}
