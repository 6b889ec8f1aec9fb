"""Clients of gateways. They know what the answer has to be, and ask again where a connection breaks."""

import asyncio
import json
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from services.gateway.text.tokenizer import load_codec
from services.worker.engine.simulated import answer_tokens, token_at
from shared.messages.sequence import Sampling
from tests.simulation.fleet import KEY, MODEL, Fleet
from tests.simulation.http import Broken, Exchange, Refused, events_in
from tests.simulation.world import Process

_AGAIN_S = 0.3
_PASSING = (408, 409, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Question:
    """One request. With a `name` it is asked again under it."""

    at_s: float
    seed: int
    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    is_streamed: bool = True
    name: str = ""
    leaves_after: int | None = None
    """The client leaves, and wants no more, after so many pieces."""
    is_long: bool = False
    """Longer than a worker is: refused until the gateway has heard what others lend."""

    @property
    def most_tokens(self) -> int:
        """Prompt and answer."""
        return len(self.prompt) + self.max_tokens

    def __str__(self) -> str:
        told = f"{self.at_s:.3f} asked: {len(self.prompt)} tokens, seed {self.seed}, most {self.max_tokens}"
        return f"{told}, n {self.n}, streamed {self.is_streamed}, {self.name!r}, leaves {self.leaves_after}"

    def body(self) -> bytes:
        said: dict[str, Any] = {
            "model": "tiny_chat",
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "n": self.n,
            "stream": self.is_streamed,
        }
        return json.dumps(said).encode()

    def expected(self) -> list[str]:
        """Of each choice."""
        return [expected_text(self.seed, choice, self.max_tokens) for choice in range(self.n)]


@cache
def codec() -> Any:
    return load_codec(MODEL)


@cache
def expected_text(seed: int, choice: int, max_tokens: int) -> str:
    """What the simulated engine answers, as text."""
    ends = codec().end_token_ids
    sampling = Sampling(max_tokens=max_tokens, seed=seed, end_token_ids=tuple(ends))
    count = min(max_tokens, answer_tokens(seed, choice))
    tokens = [token_at(sampling, choice, index, codec().vocab_size) for index in range(count)]
    return str(codec().tokenizer.decode([token for token in tokens if token not in ends]))


class Wrong(Exception):
    """An answer is not what it has to be."""


@dataclass
class Asked:
    """What has become of one question."""

    question: Question
    texts: list[str] = field(default_factory=list)
    tries: int = 0
    is_over: bool = False
    is_whole: bool = False
    refusals: list[int] = field(default_factory=list)
    wrong: str = ""


class Clients:
    """All of them, in one process that nothing happens to."""

    def __init__(self, fleet: Fleet, questions: list[Question]) -> None:
        self._fleet, self._world = fleet, fleet.world
        self.asked = [Asked(question) for question in questions]
        self.process = Process(self._world, "clients", self._run)

    @property
    def are_done(self) -> bool:
        return all(each.is_over for each in self.asked)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for each in self.asked:
                tasks.create_task(self._ask(each))
        await asyncio.Event().wait()

    async def _ask(self, asked: Asked) -> None:
        await asyncio.sleep(asked.question.at_s)
        while not asked.is_over:
            asked.tries += 1
            try:
                await self._try(asked)
            except (Broken, Refused):
                await asyncio.sleep(_AGAIN_S)
            except Wrong as error:
                asked.wrong, asked.is_over = str(error), True
        self._world.note("over", asked.question.seed, asked.is_whole, asked.tries, asked.wrong)

    async def _try(self, asked: Asked) -> None:
        question = asked.question
        gateways = self._fleet.alive("gateway")
        if not gateways:
            raise Refused
        exchange = Exchange(self._world.random.choice(gateways), self.process)
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        if question.name:
            headers["idempotency-key"] = question.name
        body = question.body()
        exchange.begin("POST", "/v1/completions", {**headers, "content-length": str(len(body))}, body)
        reader = _Reader(question)
        pieces = 0
        async for piece in exchange.pieces():
            if exchange.status != 200:
                self._on_refused(asked, exchange.status, piece)
                await asyncio.sleep(_AGAIN_S)
                return
            reader.take(piece)
            pieces += 1
            if question.leaves_after is not None and pieces >= question.leaves_after:
                exchange.leave()
                asked.is_over = True
                return
        reader.end()
        asked.texts, asked.is_over, asked.is_whole = reader.texts, True, True

    def _on_refused(self, asked: Asked, status: int, piece: bytes) -> None:
        asked.refusals.append(status)
        self._world.note("refused", asked.question.seed, status)
        if status == 400 and asked.question.is_long and b"context_length_exceeded" in piece:
            return
        if status not in _PASSING or status == 500:
            raise Wrong(f"status {status}: {piece.decode()[:500]}")


class _Reader:
    """Checks each piece as it comes."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._expected = question.expected()
        self.texts = ["" for _ in self._expected]
        self._ended: set[int] = set()
        self._is_done, self._whole = False, b""

    def take(self, piece: bytes) -> None:
        """Raises Wrong."""
        if not self._question.is_streamed:
            self._whole += piece
            return
        for event in events_in(piece):
            if event is None:
                self._is_done = True
            elif event.get("error", {}).get("code") == "shutting_down":
                raise Broken  # As it says: send it again.
            elif "error" in event:
                raise Wrong(f"an error instead of an answer: {event['error']}")
            else:
                for choice in event["choices"]:
                    self._add(choice)

    def end(self) -> None:
        """Raises Wrong."""
        if not self._question.is_streamed:
            for choice in json.loads(self._whole)["choices"]:
                self._add(choice)
        elif not self._is_done:
            raise Wrong("the stream ended without its end")
        for index, (text, expected) in enumerate(zip(self.texts, self._expected, strict=True)):
            if text != expected or index not in self._ended:
                raise Wrong(f"choice {index} is {text!r} and has to be {expected!r}")

    def _add(self, choice: dict[str, Any]) -> None:
        index = choice["index"]
        if index in self._ended:
            raise Wrong(f"choice {index} goes on after its end")
        self.texts[index] += choice["text"]
        if choice["finish_reason"] is not None:
            self._ended.add(index)
        elif not self._expected[index].startswith(self.texts[index]):
            raise Wrong(f"choice {index} says {self.texts[index]!r} instead of {self._expected[index]!r}")
