"""A plain chat client that keeps everything it was sent, for tests that look for gaps and repeats."""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.patience import STACK_PATIENCE_S

OTHER_KEY = "sk-another-tenant"
"""Of the second tenant of the stack `featured`."""


@dataclass
class Answer:
    """What one stream delivered."""

    text: str = ""
    finish_reason: str | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt."""
    chunks: int = 0
    done: bool = False
    errors: list[Any] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Ids, where the question asks for them."""
    latest_s: float = 0.0
    pause_s: float = 0.0
    """Longest time between two chunks."""

    @property
    def complete(self) -> bool:
        return self.done and self.finish_reason in ("stop", "length") and not self.errors


def assert_same(answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """Whole, and token for token what is expected."""
    errors = [answer.errors for answer in answers]
    assert not any(errors), errors
    assert all(answer.complete for answer in answers)
    assert [answer.completion_tokens for answer in answers] == [one.completion_tokens for one in expected]
    different = [i for i, (a, b) in enumerate(zip(answers, expected, strict=True)) if a.text != b.text]
    assert different == []


@dataclass(frozen=True)
class Question:
    """One chat request: a single user turn and the sampling fields of the body."""

    prompt: str
    fields: dict[str, Any]

    def body(self, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "messages": [{"role": "user", "content": self.prompt}],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }


class Client:
    """Streams many questions at once; `received` counts all their chunks, so that a test can act mid-way."""

    def __init__(self, url: str, key: str, model: str) -> None:
        self.url, self.key, self.model = url, key, model
        self.received = 0

    async def ask_all(
        self,
        questions: Sequence[Question],
        *,
        midway: Callable[[], Awaitable[None]] | None = None,
        after: int = 0,
    ) -> list[Answer]:
        """All answers, in order. `midway` runs once `after` chunks have arrived in total."""
        self.received = 0
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=STACK_PATIENCE_S, limits=limits) as http:
            tasks = [asyncio.create_task(self._ask(http, question)) for question in questions]
            if midway is not None:
                async with asyncio.timeout(STACK_PATIENCE_S):
                    while self.received < after:
                        await asyncio.sleep(0.005)
                await midway()
            return list(await asyncio.gather(*tasks))

    async def _ask(self, http: httpx.AsyncClient, question: Question) -> Answer:
        answer = Answer()
        headers = {"Authorization": f"Bearer {self.key}"}
        async with http.stream(
            "POST", "/v1/chat/completions", json=question.body(self.model), headers=headers
        ) as response:
            if response.status_code != 200:
                answer.errors.append((response.status_code, (await response.aread()).decode()))
                return answer
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    self._take(answer, line.removeprefix("data: "))
        return answer

    def _take(self, answer: Answer, data: str) -> None:
        if data == "[DONE]":
            answer.done = True
            return
        chunk = json.loads(data)
        if "error" in chunk:
            answer.errors.append(chunk["error"])
            return
        self.received += 1
        answer.chunks += 1
        now_s = time.monotonic()
        answer.pause_s = max(answer.pause_s, now_s - (answer.latest_s or now_s))
        answer.latest_s = now_s
        if chunk.get("usage"):
            answer.completion_tokens = chunk["usage"]["completion_tokens"]
            answer.cached_tokens = (chunk["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        answer.prompt += chunk.get("prompt_token_ids") or []
        for choice in chunk["choices"]:
            answer.tokens += choice.get("token_ids") or []
            answer.text += choice["delta"].get("content") or ""
            answer.finish_reason = choice["finish_reason"] or answer.finish_reason


async def _asked(job: dict[str, Any]) -> None:
    """Ask as `job` says; print `midway` and the answers. For clients on another host."""

    async def midway() -> None:
        print("midway", flush=True)

    client = Client(job["url"], job["key"], job["model"])
    questions = [Question(*each) for each in job["questions"]]
    answers = await client.ask_all(questions, midway=midway, after=job["after"])
    print(json.dumps([answer.__dict__ for answer in answers]))


if __name__ == "__main__":
    asyncio.run(_asked(json.loads(sys.argv[1])))
