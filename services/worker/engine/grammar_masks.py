"""Which tokens each constrained row may have next, found beside the forward pass.

Grammars are compiled on one thread, when a plan starts a sequence and its prompt is still to be computed;
masks are found on another, while the model computes. An answer's matcher is kept while the answer grows and
made again from its tokens where it is not there: after a move, a preemption, or too long a rest. An answer
near its limit is closed (`closing.py`). Knows no tensor.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from logging import getLogger
from threading import Lock

import numpy as np

from services.worker.core.sampling import SamplePoint
from services.worker.engine.closing import Closer
from shared.errors import KvasirError
from shared.grammars import GrammarMatcher, Grammars, Words, words_of

_log = getLogger("kvasir.worker.grammars")
_MOST_GRAMMARS = 256
"""Kept compiled."""
_MOST_MATCHERS = 4096
"""Kept at where their answers are; more would be made again in every step."""
_FAR_TOKENS, _SELDOM = 2048, 64
"""With as many tokens left an answer is looked at for closing, every so many."""
_NEAR_TOKENS, _OFTEN = 64, 8
"""The same, with so many left beyond what it may take to close it."""
_DEADLINE_S = 1.0
"""For the masks of a step once the model has computed it: rows that have none by then fail alone."""


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

    def __init__(self, rows: Sequence[int], words_per_row: int) -> None:
        self.rows = rows
        self.words = np.zeros((len(rows), words_per_row), dtype=np.uint32)
        """`[rows, words]`, a bit for each token that may follow; none: nothing may, the row fails."""
        self.done: Future[None] = Future()

    def wait(self) -> Words:
        """What was found; a row that took too long is left without a bit."""
        try:
            self.done.result(_DEADLINE_S)
        except TimeoutError:
            _log.error("the masks of %d rows took longer than %g s", len(self.rows), _DEADLINE_S)
            return self.words.copy()  # the thread goes on in the other one
        return self.words


class GrammarMasks:
    """Of one engine. `load` finds the vocabulary; it is called once, on a thread, from the start on."""

    def __init__(self, load: Callable[[], Grammars]) -> None:
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammar compiler")
        self._masker = ThreadPoolExecutor(1, thread_name_prefix="grammar masks")
        self._vocabulary = self._compiler.submit(lambda: _vocabulary(load()))
        self._compiled: OrderedDict[str, Future[_Compiled]] = OrderedDict()
        self._lock = Lock()
        self._answers: OrderedDict[int, _Answer] = OrderedDict()
        """By the identity of their tokens; only on the masks' thread."""

    def expect(self, grammar: str) -> None:
        """It is wanted soon: compile it, unless it is. Any thread may."""
        self._compile(grammar)

    def begin(self, points: Sequence[SamplePoint]) -> RowMasks | None:
        """Start to find the masks of the points that have a grammar; None where none has."""
        rows = [row for row, point in enumerate(points) if point.sampling.grammar and point.index >= 0]
        if not rows:
            return None
        masks = RowMasks(rows, words_of(self._vocabulary.result(_DEADLINE_S)[0].vocabulary))
        wanted = [points[row] for row in rows]
        self._masker.submit(self._fill, masks, wanted)
        return masks

    def close(self) -> None:
        for threads in (self._compiler, self._masker):
            threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str) -> "Future[_Compiled]":
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is None:
                compiled = self._compiled[grammar] = self._compiler.submit(self._compiled_now, grammar)
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > _MOST_GRAMMARS:
                self._compiled.popitem(last=False)
        return compiled

    def _compiled_now(self, grammar: str) -> _Compiled:
        """On the compiler's thread."""
        grammars, closer = self._vocabulary.result()
        matcher = grammars.compile(grammar)
        return _Compiled(matcher, self._compiler.submit(closer.unit_tokens, matcher.copy()))

    def _fill(self, masks: RowMasks, points: Sequence[SamplePoint]) -> None:
        """On the masks' thread."""
        try:
            for at, point in enumerate(points):
                answer = self._answer(point)
                if answer is None or answer.is_broken:
                    continue
                words = masks.words[at]
                answer.matcher.mask(words)
                if answer.is_closing:
                    self._closer.restrict(words)
                if not words.any():
                    _log.warning("an answer left its grammar: %s", answer.matcher.error)
            masks.done.set_result(None)
        except BaseException as error:
            masks.done.set_exception(error)

    def _answer(self, point: SamplePoint) -> _Answer | None:
        """With everything accepted that has been generated."""
        key, limit = id(point.tokens), point.sampling.max_tokens - point.sampling.forced_tokens
        answer = self._answers.get(key)
        if answer is None or answer.tokens is not point.tokens or answer.accepted > point.index:
            try:
                compiled = self._compile(point.sampling.grammar).result(_DEADLINE_S)
            except (KvasirError, TimeoutError) as error:
                _log.warning("a grammar cannot be compiled: %s", error)
                return None
            answer = _Answer(point.tokens, compiled.matcher.copy(), compiled.unit_tokens)
            self._answers[key] = answer
            self._look(answer, limit)
        self._answers.move_to_end(key)
        while len(self._answers) > _MOST_MATCHERS:
            self._answers.popitem(last=False)
        first = len(point.tokens) - point.index + answer.accepted
        for token in point.tokens[first:]:
            answer.is_broken = answer.is_broken or not answer.matcher.accept(token)
            answer.accepted += 1
            self._look(answer, limit)
        return answer

    def _look(self, answer: _Answer, max_tokens: int) -> None:
        """Now and then, near its limit: whether it should close. At the same places whoever computes it."""
        left_tokens = max_tokens - answer.accepted
        is_first = not answer.accepted and left_tokens <= _NEAR_TOKENS
        if answer.is_broken or left_tokens > _FAR_TOKENS or (left_tokens % _OFTEN and not is_first):
            return
        unit_tokens = answer.unit_tokens.result(_DEADLINE_S)
        every = _OFTEN if left_tokens <= 2 * unit_tokens + _NEAR_TOKENS else _SELDOM
        if unit_tokens and (left_tokens % every == 0 or is_first):
            answer.is_closing = self._closer.is_due(answer.matcher, left_tokens, unit_tokens, every)

    @property
    def _closer(self) -> Closer:
        return self._vocabulary.result()[1]


def _vocabulary(grammars: Grammars) -> tuple[Grammars, Closer]:
    return grammars, Closer(grammars)
