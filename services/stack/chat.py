"""`chat`: talk to the model on the terminal, over the gateway's HTTP API."""

import contextlib
import json
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console

from services.stack.display import nothing_runs
from services.stack.rundir import RunDirectory
from shared.errors import UnavailableError

_CONNECT_S = 5.0
_SILENCE_S = 120.0
"""An answer is aborted after this long without data."""


class ChatFailed(UnavailableError):
    """The gateway refused the request, or the answer broke off."""

    code = "chat_failed"


@dataclass
class Conversation:
    """A conversation's messages, its connection, and the other fields of each request."""

    client: httpx.Client
    fields: Mapping[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, question: str) -> Generator[str]:
        """Stream the answer. A failed or abandoned turn is not recorded. Raise ChatFailed."""
        asked = [*self.messages, {"role": "user", "content": question}]
        answer: list[str] = []
        try:
            body = {**self.fields, "messages": asked, "stream": True}
            with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
                _raise_for(response)
                for piece in contents(response.iter_lines()):
                    answer.append(piece)
                    yield piece
        except httpx.HTTPError as error:
            raise ChatFailed(f"the answer broke off: {error or type(error).__name__}") from None
        self.messages = [*asked, {"role": "assistant", "content": "".join(answer)}]


def chat(
    run: RunDirectory,
    console: Console,
    question: Sequence[str] = (),
    *,
    model: str | None = None,
    system: str | None = None,
    **fields: Any,
) -> int:
    """Chat until /exit or end of input, or print one answer. `model` is by default the first that is served;
    `fields` of the requests are omitted where they are None. Raise ChatFailed without a stack."""
    state = run.read_state()
    if run.holder() is None or "url" not in state:
        raise ChatFailed(nothing_runs(run))
    headers = {"Authorization": f"Bearer {run.credentials().api_key}"}
    timeout = httpx.Timeout(_SILENCE_S, connect=_CONNECT_S)
    with httpx.Client(base_url=state["url"], headers=headers, timeout=timeout, trust_env=False) as client:
        given = {name: value for name, value in fields.items() if value is not None}
        conversation = Conversation(client, {"model": model or _first_model(client), **given})
        if system:
            conversation.messages.append({"role": "system", "content": system})
        if not (asked := " ".join(question)):
            return _converse(conversation, console)
        _print_answer(conversation, asked)
        return 0


def _converse(conversation: Conversation, console: Console) -> int:
    console.print(
        f"{conversation.fields['model']}: /exit ends, /new forgets, Ctrl-C stops an answer",
        style="dim",
        markup=False,
    )
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # enables line editing in input()
    while (line := _read_line()) not in (None, "/exit", "/quit"):
        if line == "/new":
            conversation.messages = [one for one in conversation.messages if one["role"] == "system"]
        elif line:
            try:
                _print_answer(conversation, line)
            except ChatFailed as error:
                console.print(error.message, style="red", markup=False)
    return 0


def _read_line() -> str | None:
    """Return one stripped line, or None at end of input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def _print_answer(conversation: Conversation, question: str) -> None:
    """Print the answer as it streams. Ctrl-C cancels the answer, not the program."""
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(conversation.ask(question)) as pieces:
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()


def _first_model(client: httpx.Client) -> str:
    try:
        response = client.get("/v1/models")
    except httpx.HTTPError as error:
        raise ChatFailed(f"the gateway at {client.base_url} does not answer: {error}") from None
    _raise_for(response)
    return str(response.json()["data"][0]["id"])


def _raise_for(response: httpx.Response) -> None:
    if response.is_success:
        return
    body = response.read().decode("utf-8", "replace")
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = body[:300]
    raise ChatFailed(f"{response.status_code}: {message}")


def contents(lines: Iterator[str]) -> Iterator[str]:
    """Yield the content of an event stream until `[DONE]`. Raise ChatFailed for an error event."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ChatFailed(str(event["error"].get("message", event["error"])))
        for choice in event.get("choices", []):
            if content := choice.get("delta", {}).get("content"):
                yield content
    raise ChatFailed("the answer ended without [DONE]")
