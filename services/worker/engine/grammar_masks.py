"""Which tokens each constrained row may have next, found beside the forward pass.

Grammars are compiled on one thread, and how they close is found on another, when a plan starts a sequence and
its prompt is still to be computed. Masks that take longer than it costs to wake another thread are found on a
third while the model computes; those that it has not begun by then, and the others, by the engine's. An
answer's matcher is kept while the answer grows and made again from its tokens where it is not there: after a
move, a preemption, or too long a rest. An answer near its limit is closed (`closing.py`). Knows no tensor.
"""

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
_MOST_GRAMMARS = 256
"""Kept compiled."""
_MOST_RESTING = 64
"""Kept where their answers are, beside those of a step's own rows: nobody says which are over, and each has
some 15 kB."""
_FAR_TOKENS, _SELDOM = 2048, 64
"""With as many tokens left an answer is looked at for closing, every so many."""
_NEAR_TOKENS, _OFTEN = 64, 8
"""The same, with so many left beyond what it may take to close it."""
_WORTH_S, _WEIGHT = 60e-6, 0.05
"""What takes longer is worth waking a thread, which takes some 25 µs of the engine's and waits for a core;
weight of a mask in the average."""
_DEADLINE_S = 1.0
"""For the masks of a step once the model has computed it: rows that have none by then fail alone."""
_MOST_LEFT = 3
"""Threads that are left to a grammar that does not end, each with a core of its own."""


@dataclass(slots=True)
class _Answer:
    """Where one answer is in its grammar."""

    tokens: Sequence[int]
    """The sequence's own list, which only grows; another list is another attempt."""
    matcher: GrammarMatcher
    unit_tokens: "Future[int]"
    accepted: int = 0
    is_broken: bool = False
    is_closing: bool = False


@dataclass(frozen=True, slots=True)
class _Compiled:
    matcher: GrammarMatcher
    """At the beginning."""
    unit_tokens: "Future[int]"
    """See `Closer.unit_tokens`; found after the matcher, which a first token waits for."""


class RowMasks:
    """Of the constrained ones among a step's points; `words` may be read after `wait`."""

    def __init__(self, rows: Sequence[int], words_per_row: int, find: Callable[[int, Words], None]) -> None:
        """`find` writes one row's: it is given its place in `rows`, and is called on either thread."""
        self.rows = rows
        self.words = np.zeros((len(rows), words_per_row), dtype=np.uint32)
        """`[rows, words]`, a bit for each token that may follow; none: nothing may, the row fails."""
        self._find = find
        self._left = list(range(len(rows)))
        """Begun by nobody yet. Taking one, and noting one, are single operations of the interpreter."""
        self._found: list[int] = []
        self._is_done = Event()
        self._error: Exception | None = None

    def find(self) -> None:
        """Those that nobody has begun."""
        while self._left:
            try:
                at = self._left.pop()
            except IndexError:  # the other thread was quicker
                return
            try:
                self._find(at, self.words[at])
            except Exception as error:
                self._error = error
            self._found.append(at)
            if len(self._found) == len(self.rows):
                self._is_done.set()

    def wait(self) -> Words:
        """All of them; a row that took the other thread too long is left without a bit. Raises what finding
        them raised."""
        self.find()
        if not self._is_done.wait(_DEADLINE_S):
            _log.error("the masks of %d rows took longer than %g s", len(self.rows), _DEADLINE_S)
            return self.words.copy()  # the thread goes on in the other one
        if self._error is not None:
            raise self._error
        return self.words


class GrammarMasks:
    """Of one engine. `load` finds the vocabulary; it is called once, on a thread, from the start on."""

    def __init__(self, load: Callable[[], Grammars]) -> None:
        self._compiler = _new_compiler()
        self._closing = ThreadPoolExecutor(1, thread_name_prefix="grammar closing")
        """First tokens do not wait for it, but for the compiler."""
        self._compiling_since_s: float | None = None
        self._left_compilers = 0
        self._wanted: SimpleQueue[RowMasks | None] = SimpleQueue()
        """One step's at a time: the engine waits for them before it asks again."""
        Thread(target=self._help, name="grammar masks", daemon=True).start()
        self._vocabulary = self._compiler.submit(lambda: _vocabulary(load()))
        self._compiled: OrderedDict[str, Future[_Compiled]] = OrderedDict()
        self._lock = Lock()
        self._answers: OrderedDict[int, _Answer] = OrderedDict()
        """By the identity of their tokens, who rests longest first. No two threads have the same one."""
        self._most = _MOST_RESTING
        self._row_s = 0.0
        """What a mask takes, on average."""

    def expect(self, grammar: str) -> None:
        """It is wanted soon: compile it, unless it is. Any thread may."""
        self._compile(grammar)

    def begin(self, points: Sequence[SamplePoint]) -> RowMasks | None:
        """Start to find the masks of the points that have a grammar; None where none has."""
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
        """As long as many masks: a look for closing, or every token of an answer that was elsewhere."""
        left_tokens = _limit(point) - point.index
        may_be_looked_at = left_tokens <= _FAR_TOKENS and left_tokens % _OFTEN == 0
        answer = self._answers.get(id(point.tokens))
        return may_be_looked_at or (point.index > 0 and (answer is None or answer.tokens is not point.tokens))

    def close(self) -> None:
        """The threads end."""
        for threads in (self._compiler, self._closing):
            threads.shutdown(wait=False, cancel_futures=True)
        self._wanted.put(None)

    def _compile(self, grammar: str) -> "Future[_Compiled]":
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
        """Leave the thread to a grammar that holds it for longer than any row waits. Those that wait behind
        it are compiled on another thread when they are asked for again."""
        began_s = self._compiling_since_s
        if (
            began_s is not None
            and monotonic_s() - began_s > _DEADLINE_S
            and self._left_compilers < _MOST_LEFT
        ):
            _log.error("a grammar has taken longer than %g s to compile: another thread goes on", _DEADLINE_S)
            self._compiler.shutdown(wait=False, cancel_futures=True)
            self._compiler, self._compiling_since_s = _new_compiler(), None
            self._left_compilers += 1

    def _compiled_now(self, grammar: str) -> _Compiled:
        """On the compiler's thread."""
        grammars, closer = self._vocabulary.result()
        began_s = self._compiling_since_s = monotonic_s()
        try:
            matcher = grammars.compile(grammar)
        finally:
            if self._compiling_since_s == began_s:  # else the thread was left
                self._compiling_since_s = None
        return _Compiled(matcher, self._closing.submit(closer.unit_tokens, matcher.copy()))

    def _help(self) -> None:
        """The masks' thread."""
        while (masks := self._wanted.get()) is not None:
            masks.find()

    def _find(self, point: SamplePoint, words: Words) -> None:
        began_s = thread_time()
        answer = self._answer(point)
        if answer is None or answer.is_broken:
            return
        answer.matcher.mask(words)
        if answer.is_closing:
            self._closer.restrict(words, answer.matcher)
        if not words.any():
            _log.warning("an answer left its grammar: %s", answer.matcher.error)
        self._row_s = averaged(self._row_s, thread_time() - began_s, _WEIGHT)

    def _answer(self, point: SamplePoint) -> _Answer | None:
        """With everything accepted that has been generated."""
        key, limit = id(point.tokens), _limit(point)
        answer = self._answers.get(key)
        if answer is None or answer.tokens is not point.tokens or answer.accepted > point.index:
            try:
                compiled = self._compile(point.sampling.grammar).result(_DEADLINE_S)
            except (KvasirError, TimeoutError, CancelledError) as error:
                _log.warning("a grammar cannot be compiled: %s", error)
                return None
            answer = _Answer(point.tokens, compiled.matcher.copy(), compiled.unit_tokens)
        with self._lock:
            self._answers[key] = answer
            self._answers.move_to_end(key)
            while len(self._answers) > self._most:
                self._answers.popitem(last=False)
        news = point.tokens[len(point.tokens) - point.index + answer.accepted :]
        look_at = self._last_look(answer, answer.accepted + len(news), limit)
        for token in news:
            answer.is_broken = answer.is_broken or not answer.matcher.accept(token)
            answer.accepted += 1
            if answer.accepted == look_at and not answer.is_broken:
                self._look(answer, limit)
        return answer

    def _last_look(self, answer: _Answer, until: int, max_tokens: int) -> int:
        """At which of the tokens up to `until` an answer is looked at last; 0: at none. What earlier looks
        found does not matter any more: an answer that goes on elsewhere does without them."""
        looks = (at for at in range(until, answer.accepted, -1) if self._look_every(answer, at, max_tokens))
        return next(looks, 0)

    def _look_every(self, answer: _Answer, at: int, max_tokens: int) -> int:
        """How many tokens it is to the next look where there is one after so many tokens; else 0. At the same
        places whoever computes it; the first token does not wait for what that takes to know."""
        left_tokens = max_tokens - at
        is_first = at == 1 and left_tokens <= _NEAR_TOKENS
        if left_tokens > _FAR_TOKENS or (left_tokens % _OFTEN and not is_first):
            return 0
        unit_tokens = _unit_tokens(answer)
        every = _OFTEN if left_tokens <= 2 * unit_tokens + _NEAR_TOKENS else _SELDOM
        return every if unit_tokens and (left_tokens % every == 0 or is_first) else 0

    def _look(self, answer: _Answer, max_tokens: int) -> None:
        """Whether it should close."""
        every = self._look_every(answer, answer.accepted, max_tokens)
        unit_tokens, left_tokens = _unit_tokens(answer), max_tokens - answer.accepted
        answer.is_closing = self._closer.is_due(answer.matcher, left_tokens, unit_tokens, every)

    @property
    def _closer(self) -> Closer:
        return self._vocabulary.result()[1]


def _new_compiler() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="grammar compiler")


def _unit_tokens(answer: _Answer) -> int:
    """0, as for what cannot be closed, where it is not found in time."""
    try:
        return answer.unit_tokens.result(_DEADLINE_S)
    except (TimeoutError, CancelledError):
        return 0


def _limit(point: SamplePoint) -> int:
    """The longest answer, in tokens."""
    return point.sampling.max_tokens - point.sampling.forced_tokens


def _vocabulary(grammars: Grammars) -> tuple[Grammars, Closer]:
    return grammars, Closer(grammars)
