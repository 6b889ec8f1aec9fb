"""Checks grammars in processes that may crash (`checker.py`). Verdicts are cached; a grammar that killed a
checker is never tried again. The process starts with the first grammar."""

import asyncio
import json
import socket
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Generic, NamedTuple, TypeVar

from services.gateway.errors import UnsupportedFeature, shown
from services.gateway.forms.checker import DIED, REFUSED
from services.gateway.forms.json_schemas import explained, parts
from shared.errors import InvalidRequest, Overloaded, UnavailableError
from shared.grammars import MOST_GRAMMAR_CHARS, json_grammar
from shared.log import get_logger

_log = get_logger("gateway.forms")
_ROOT = Path(__file__).parents[3]
CHECKERS = 4
"""Number of grammars checked concurrently, each of another key."""
_MOST_KNOWN, _MOST_DEADLY = 256, 4096
"""Number of cached verdicts, and of digests of grammars that killed a checker."""
_START_S = 30.0
_REPLY_S = 10.0
"""Seconds for one verdict. CPU time is limited to 0.2 s; this is for a checker that hangs idle."""
_KILL_S = 1.0
Streams = list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
_Item = TypeVar("_Item")
MOST_WAITING, MOST_WAITING_OF_A_KEY = 512, 64
"""Number of grammars that wait for a checker, and of those of one key."""
_MOST_LOOKS = 48
"""Parts of a refused schema to check separately for the culprit."""
DANGEROUS = (
    "the form takes too much time or memory, or ends the process that follows it: "
    "make its bounds, repetitions and alternatives smaller"
)


class CheckQueue(Generic[_Item]):
    """Fair queue for a few places: keys alternate, and a key has at most one place at a time. The queue of a
    key is bounded, so a key that floods it delays only itself."""

    def __init__(self, places: Iterable[int]) -> None:
        self._free = list(places)
        self._taken: dict[str, int] = {}
        self._waiting: OrderedDict[str, deque[_Item]] = OrderedDict()
        """By key; the key served last comes last."""

    def ask(self, key: str, item: _Item) -> None:
        """Queue an item. Raises Overloaded when a queue is full."""
        waiting = self._waiting.setdefault(key, deque())
        if len(waiting) >= MOST_WAITING_OF_A_KEY or sum(map(len, self._waiting.values())) >= MOST_WAITING:
            self._forget(key)
            raise Overloaded("too many forms of answers wait to be checked: try again", retry_after_s=1.0)
        waiting.append(item)

    def begin(self) -> tuple[str, int, _Item] | None:
        """Return the next key, place and item; None while all places or all waiting keys are busy."""
        key = next((key for key in self._waiting if key not in self._taken), None)
        if key is None or not self._free:
            return None
        item = self._waiting[key].popleft()
        self._forget(key)
        place = self._taken[key] = self._free.pop()
        return key, place, item

    def end(self, key: str) -> None:
        self._free.append(self._taken.pop(key))
        if key in self._waiting:
            self._waiting.move_to_end(key)

    def _forget(self, key: str) -> None:
        if not self._waiting[key]:
            del self._waiting[key]


class FormVerdict(NamedTuple):
    grammar: str
    reason: str = ""
    """Why it is refused; empty: it is accepted."""


class GrammarChecks:
    """Grammar checks for one model, on one event loop."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` holds the tokenizer; None: the model has no structured output."""
        self._folder = folder
        self._known: OrderedDict[bytes, FormVerdict] = OrderedDict()
        self._deadly: OrderedDict[bytes, None] = OrderedDict()
        """Kept apart: other grammars must not evict the verdicts that are costliest to find."""
        self._asked: dict[tuple[str, bytes], asyncio.Future[FormVerdict]] = {}
        self._turns: CheckQueue[tuple[bytes, str]] = CheckQueue(range(CHECKERS))
        self._tasks: set[asyncio.Task[None]] = set()
        self._process: Popen[bytes] | None = None
        self._streams: Streams = []
        self._starting = asyncio.Lock()
        self._is_closed = False

    async def check(
        self, grammar: str, param: str, key: str = "", suspects: Sequence[tuple[str, str]] = ()
    ) -> str:
        """Return the grammar to use. Keys do not wait for each other's grammars. `suspects` are the grammar's
        parts with their paths; the error names the first refused one. Raises InvalidRequest naming `param` or
        a suspect's path, UnsupportedFeature without `folder`, Overloaded, UnavailableError."""
        if self._folder is None:
            raise UnsupportedFeature("this model's answers cannot be kept to a form", param=param)
        (good, reason), where = await self.verdict(grammar, key), ""
        if not reason:
            return good
        for path, suspect in suspects:
            if found := (await self.verdict(suspect, key)).reason:
                param, reason, where = path, found, await self._place_of(found, suspect, key)
                break
        raise InvalidRequest(f"{param} is not supported{where}: {explained(reason)}", param=param)

    async def _place_of(self, reason: str, form: str, key: str) -> str:
        """Return the location of the smallest schema part that is refused for the same reason."""
        schema = json.loads(form)["grammars"][0].get("json_schema", {})
        around = {name: schema[name] for name in ("$schema", "$defs", "definitions") if name in schema}
        where: list[str] = []
        looks = 0
        left = parts(schema) if reason != DANGEROUS else iter(())
        while (at := next(left, None)) is not None and looks < _MOST_LOOKS:
            looks += 1
            found = await self.verdict(json_grammar({**around, **at[1]}), key)
            if found.reason == reason:
                where.append(at[0])
                left = parts(at[1])
        return f" at {shown('.'.join(where), 200)}" if where else ""

    async def verdict(self, grammar: str, key: str) -> FormVerdict:
        """Return the grammar's verdict. Raises Overloaded, UnavailableError."""
        if len(grammar) > MOST_GRAMMAR_CHARS:
            return FormVerdict(
                "", f"it has {len(grammar)} characters; at most {MOST_GRAMMAR_CHARS} are taken"
            )
        digest = blake2b(grammar.encode(), digest_size=16).digest()
        if (known := self._recalled(digest)) is not None:
            return known
        asked = self._asked.get((key, digest))
        if asked is None:
            self._turns.ask(key, (digest, grammar))
            asked = self._asked[key, digest] = asyncio.get_running_loop().create_future()
            asked.add_done_callback(lambda _: self._asked.pop((key, digest)))
            self._begin()
        return await asyncio.shield(asked)

    def _begin(self) -> None:
        while not self._is_closed and (turn := self._turns.begin()) is not None:
            task = asyncio.create_task(self._serve(*turn), name="check of a grammar")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, key: str, place: int, item: tuple[bytes, str]) -> None:
        digest, grammar = item
        asked = self._asked[key, digest]
        try:
            known = self._recalled(digest)
            if known is None:
                known = await self._ask(place, grammar)
                self._remember(digest, known)
            asked.set_result(known)
        except UnavailableError as error:
            asked.set_exception(error)
            asked.exception()  # the client may be gone
        finally:
            asked.cancel()  # no effect on a finished future
            self._turns.end(key)
            self._begin()

    async def _ask(self, place: int, grammar: str) -> FormVerdict:
        """Ask the checker at `place`. Raises UnavailableError."""
        process, streams = await self._running()
        (reader, writer), question = streams[place], grammar.encode()
        try:
            async with asyncio.timeout(_REPLY_S):
                writer.write(len(question).to_bytes(4) + question)
                reply = await _read(reader)
        except (OSError, EOFError, TimeoutError) as error:
            self._stop(process)
            raise _unavailable("has ended") from error
        kind, text = reply[:1], reply[1:].decode()
        if kind == DIED:
            _log.warning("a grammar ended its checker: %s; it is refused from now on", text)
            return FormVerdict("", DANGEROUS)
        if kind == REFUSED:
            return FormVerdict("", text)
        return FormVerdict(grammar if text == grammar else text)

    async def _running(self) -> tuple[Popen[bytes], Streams]:
        """Start the process if needed, and wait until its checkers are ready. Raises UnavailableError."""
        async with self._starting:
            if self._process is None:
                try:
                    self._process, nears = self._start()
                    async with asyncio.timeout(_START_S):
                        self._streams = [await asyncio.open_connection(sock=near) for near in nears]
                        for reader, _ in self._streams:
                            await _read(reader)
                except (OSError, EOFError, TimeoutError) as error:
                    if self._process is not None:
                        self._stop(self._process)
                    raise _unavailable("does not start") from error
            return self._process, self._streams

    def _start(self) -> tuple[Popen[bytes], list[socket.socket]]:
        """Start the process; return it and a socket to each checker. Raises OSError."""
        pairs = [socket.socketpair() for _ in range(CHECKERS)]
        theirs = [far.fileno() for _, far in pairs]
        command = [sys.executable, "-m", "services.gateway.forms.checker", str(self._folder)]
        try:
            process = Popen([*command, *map(str, theirs)], pass_fds=theirs, stdin=DEVNULL, cwd=_ROOT)
        finally:
            for _, far in pairs:
                far.close()
        return process, [near for near, _ in pairs]

    def _recalled(self, digest: bytes) -> FormVerdict | None:
        if digest in self._deadly:
            return FormVerdict("", DANGEROUS)
        if digest in self._known:
            self._known.move_to_end(digest)
        return self._known.get(digest)

    def _remember(self, digest: bytes, verdict: FormVerdict) -> None:
        if verdict.reason == DANGEROUS:
            self._deadly[digest] = None
            if len(self._deadly) > _MOST_DEADLY:
                self._deadly.popitem(last=False)
            return
        self._known[digest] = verdict
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    def _stop(self, process: Popen[bytes]) -> None:
        """Kill the process; the next grammar starts another."""
        if process is not self._process:
            return
        for _, writer in self._streams:
            writer.close()  # ends who reads from it
        self._process, self._streams = None, []
        process.kill()
        with suppress(TimeoutExpired):
            process.wait(_KILL_S)

    def close(self) -> None:
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        if self._process is not None:
            self._stop(self._process)


async def _read(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4)))


def _unavailable(what: str) -> UnavailableError:
    return UnavailableError(f"the process that checks forms of answers {what}: try again", retry_after_s=1.0)
