"""Computes grammar masks: which tokens each constrained row may sample next.

One thread compiles grammars, another computes `Closer.unit_tokens`, as soon as a plan starts a sequence. A
third computes expensive masks during the forward pass; the engine's thread computes the rest. An answer's
matcher is rebuilt from its tokens after a migration or a preemption. Near its limit an answer is closed
(`closing.py`)."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from logging import getLogger
from queue import SimpleQueue
from threading import Event, Lock, Thread
from time import thread_time

import numpy as np

from services.worker.core.sampling import SamplePoint
from services.worker.engine.closing import Closer
from shared.average import averaged
from shared.clock import monotonic_s
from shared.errors import KvasirError
from shared.grammars import GrammarMatcher, Grammars, Words, words_of

_log = getLogger("kvasir.worker.grammars")
_MOST_GRAMMARS = 64
"""Number of compiled grammars kept."""
_MOST_RESTING = 64
"""Number of matchers kept beside those of the step's rows, about 15 kB each."""
_FAR_TOKENS, _SELDOM = 2048, 64
"""With at most 2048 tokens left, an answer is checked for closing every 64 tokens."""
_NEAR_TOKENS, _OFTEN = 64, 8
"""With at most 64 tokens left beyond what closing may take, an answer is checked every 8 tokens."""
_WORTH_S, _WEIGHT = 60e-6, 0.05
"""Estimated seconds from which masks go to the other thread (waking it costs 25 µs); weight of a new mask."""
_DEADLINE_S = 1.0
"""Seconds a step waits for its masks; rows without a mask by then fail alone."""
_MOST_LEFT = 3
"""Number of compiler threads that may be abandoned to grammars that hang; each occupies a core."""


_Compiled = tuple[GrammarMatcher, "Future[int]"]
"""A matcher at the start of its grammar, and `Closer.unit_tokens`, for which first tokens do not wait."""


@dataclass(slots=True)
class _Answer:
    """State of one answer in its grammar."""

    tokens: Sequence[int]
    """The sequence's token list, which only grows; another list object is another attempt."""
    matcher: GrammarMatcher
    unit_tokens_found: "Future[int]"
    accepted: int = 0
    is_broken: bool = False
    is_closing: bool = False

    @property
    def unit_tokens(self) -> int:
        """See `Closer`; 0 (cannot be closed) if it is not known in time."""
        try:
            return self.unit_tokens_found.result(_DEADLINE_S)
        except (TimeoutError, CancelledError):
            return 0


class RowMasks:
    """Masks of a step's constrained rows; read `words` after `wait`."""

    def __init__(self, rows: Sequence[int], words_per_row: int, find: Callable[[int, Words], None]) -> None:
        """`find` writes the mask of one row, given its index in `rows`; either thread calls it."""
        self.rows = rows
        self.words = np.zeros((len(rows), words_per_row), dtype=np.uint32)
        """`[rows, words]`, a bit for each allowed token; a row without any bit fails."""
        self._find = find
        self._left = list(range(len(rows)))
        """Rows that no thread has started; `pop` and `append` are atomic."""
        self._found: list[int] = []
        self._is_done = Event()
        self._error: Exception | None = None

    def find(self) -> None:
        """Compute the masks that no thread has started."""
        while self._left:
            try:
                at = self._left.pop()
            except IndexError:  # the other thread took the last row
                return
            try:
                self._find(at, self.words[at])
            except Exception as error:
                self._error = error
            self._found.append(at)
            if len(self._found) == len(self.rows):
                self._is_done.set()

    def wait(self) -> Words:
        """Return all masks; a row not done within the deadline has no bit set. Raises the error of `find`."""
        self.find()
        if not self._is_done.wait(_DEADLINE_S):
            _log.error("the masks of %d rows took longer than %g s", len(self.rows), _DEADLINE_S)
            return self.words.copy()  # the other thread still writes to the original
        if self._error is not None:
            raise self._error
        return self.words


class GrammarMasks:
    """The grammars and matchers of one engine; `load` is called once, on the compiler's thread."""

    def __init__(self, load: Callable[[], Grammars]) -> None:
        self._compiler = _new_compiler()
        self._closing = ThreadPoolExecutor(1, thread_name_prefix="grammar closing")
        """Computes `unit_tokens` apart from the compiler, for which first tokens wait."""
        self._compiling_since_s: float | None = None
        self._left_compilers = 0
        self._wanted: SimpleQueue[RowMasks | None] = SimpleQueue()
        """At most one step's masks: the engine waits for them before the next step."""
        Thread(target=self._help, name="grammar masks", daemon=True).start()
        self._vocabulary = self._compiler.submit(lambda: _vocabulary(load()))
        self._compiled: OrderedDict[str, Future[_Compiled]] = OrderedDict()
        self._lock = Lock()
        self._answers: OrderedDict[int, _Answer] = OrderedDict()
        """By `id` of their token list, least recently used first. No two threads use the same answer."""
        self._most = _MOST_RESTING
        self._row_s = 0.0
        """Average seconds per mask."""

    def begin(self, points: Sequence[SamplePoint]) -> RowMasks | None:
        """Start computing the masks of the points that have a grammar; return None if none has."""
        rows = [row for row, point in enumerate(points) if point.sampling.grammar and point.index >= 0]
        if not rows:
            return None
        self._most = len(rows) + _MOST_RESTING
        wanted = [points[row] for row in rows]
        words_per_row = words_of(self._vocabulary.result(_DEADLINE_S)[0].vocabulary)
        masks = RowMasks(rows, words_per_row, lambda at, words: self._find(wanted[at], words))
        if len(rows) * self._row_s > _WORTH_S or any(map(self._takes_long, wanted)):
            self._wanted.put(masks)
        return masks

    def _takes_long(self, point: SamplePoint) -> bool:
        """Return whether the mask needs a check for closing, or a matcher rebuilt from all tokens."""
        left_tokens, answer = _limit(point) - point.index, self._answers.get(id(point.tokens))
        is_known = answer is not None and answer.tokens is point.tokens
        return (left_tokens <= _FAR_TOKENS and left_tokens % _OFTEN == 0) or not (
            is_known or point.index <= 0
        )

    def close(self) -> None:
        """End the threads."""
        for threads in (self._compiler, self._closing):
            threads.shutdown(wait=False, cancel_futures=True)
        self._wanted.put(None)

    def expect(self, grammar: str) -> "Future[_Compiled]":
        """Compile a grammar unless it is cached. Any thread may call this."""
        with self._lock:
            self._leave_a_hung_compiler()
            compiled = self._compiled.get(grammar)
            if compiled is None or compiled.cancelled():
                compiled = self._compiled[grammar] = self._compiler.submit(self._compiled_now, grammar)
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > _MOST_GRAMMARS:
                self._compiled.popitem(last=False)
        return compiled

    def _leave_a_hung_compiler(self) -> None:
        """Abandon the compiler's thread if a grammar holds it past the deadline, and start another.

        Grammars queued behind it are compiled when they are requested again."""
        began_s = self._compiling_since_s
        if began_s is None or monotonic_s() - began_s <= _DEADLINE_S or self._left_compilers >= _MOST_LEFT:
            return
        _log.error("a grammar has taken longer than %g s to compile: another thread goes on", _DEADLINE_S)
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self._compiler, self._compiling_since_s = _new_compiler(), None
        self._left_compilers += 1

    def _compiled_now(self, grammar: str) -> _Compiled:
        """Compile a grammar; called on the compiler's thread."""
        grammars, closer = self._vocabulary.result()
        began_s = self._compiling_since_s = monotonic_s()
        try:
            matcher = grammars.compile(grammar)
        finally:
            if self._compiling_since_s == began_s:  # else the thread was abandoned
                self._compiling_since_s = None
        return matcher, self._closing.submit(closer.unit_tokens, matcher.copy())

    def _help(self) -> None:
        """Compute queued masks; the main loop of the masks' thread."""
        while (masks := self._wanted.get()) is not None:
            masks.find()

    def _find(self, point: SamplePoint, words: Words) -> None:
        began_s = thread_time()
        answer = self._answer(point)
        if answer is None or answer.is_broken:
            return
        answer.matcher.mask(words)
        if answer.is_closing:
            self._vocabulary.result()[1].restrict(words, answer.matcher)
        if not words.any():
            _log.warning("an answer left its grammar: %s", answer.matcher.error)
        self._row_s = averaged(self._row_s, thread_time() - began_s, _WEIGHT)

    def _answer(self, point: SamplePoint) -> _Answer | None:
        """Return the answer's state after all its generated tokens, or None if its grammar fails."""
        key, limit = id(point.tokens), _limit(point)
        answer = self._answers.get(key)
        if answer is None or answer.tokens is not point.tokens or answer.accepted > point.index:
            try:
                matcher, unit_tokens = self.expect(point.sampling.grammar).result(_DEADLINE_S)
            except (KvasirError, TimeoutError, CancelledError) as error:
                _log.warning("a grammar cannot be compiled: %s", error)
                return None
            answer = _Answer(point.tokens, matcher.copy(), unit_tokens)
        with self._lock:
            self._answers[key] = answer
            self._answers.move_to_end(key)
            while len(self._answers) > self._most:
                self._answers.popitem(last=False)
        news = point.tokens[len(point.tokens) - point.index + answer.accepted :]
        # Only the last check matters, so an answer that migrates closes in the same way.
        counts = range(answer.accepted + len(news), answer.accepted, -1)
        look_at = next((at for at in counts if _look_every(answer, at, limit)), 0)
        for token in news:
            answer.is_broken = answer.is_broken or not answer.matcher.accept(token)
            answer.accepted += 1
            if answer.accepted == look_at and not answer.is_broken:
                every, left_tokens = _look_every(answer, look_at, limit), limit - look_at
                closer = self._vocabulary.result()[1]
                answer.is_closing = closer.is_due(answer.matcher, left_tokens, answer.unit_tokens, every)
        return answer


def _look_every(answer: _Answer, at: int, max_tokens: int) -> int:
    """Return the tokens to the next check for closing if there is a check after `at` tokens, else 0.

    The same on every worker. The first token does not wait for `unit_tokens`."""
    left_tokens = max_tokens - at
    is_first = at == 1 and left_tokens <= _NEAR_TOKENS
    if left_tokens > _FAR_TOKENS or (left_tokens % _OFTEN and not is_first):
        return 0
    unit_tokens = answer.unit_tokens
    every = _OFTEN if left_tokens <= 2 * unit_tokens + _NEAR_TOKENS else _SELDOM
    return every if unit_tokens and (left_tokens % every == 0 or is_first) else 0


def _new_compiler() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="grammar compiler")


def _limit(point: SamplePoint) -> int:
    """Return the maximum number of generated tokens."""
    return point.sampling.max_tokens - point.sampling.forced_tokens


def _vocabulary(grammars: Grammars) -> tuple[Grammars, Closer]:
    return grammars, Closer(grammars)
