"""Drafts by prompt lookup: what followed a sequence's newest tokens where they stood before. Pure.

A step computes a draft's tokens beside the newest one, and those that the sampler draws as well are kept, so
that no answer changes. Every guess is compared with what came, computed or not: the share that was right and
the measured duration of steps say how many rows pay. Source: Prompt Lookup Decoding (Saxena, 2023).

    … the cat sat on the mat. I saw the cat sat → draft: on the mat    sampled: on the rug → on the is kept
    0.9 right, a step of 1 row 10 ms, of 3 rows 14 ms → 2.71 tokens in 14 ms: pays; of 3 rows 30 ms: does not
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.average import averaged
from shared.messages.sequence import SequenceRef

MOST_ROWS = 16
"""Maximum number of rows in a step with drafts."""
_LENGTHS = (4, 3, 2)
"""Numbers of newest tokens that are looked up, in this order."""
_FIRST_RIGHT = 0.5
_WEIGHT = 0.2
_UNKNOWN_ROW = 0.1
"""Share of a step that each row more is taken to cost until one was measured."""
_FORGOTTEN = 2e-4
"""Share of a measurement that is forgotten in each step, so that it is made again some time."""
_LEAST_GAIN = 1.1
_WIDTH = 4
_MOST_KNOWN = 64


class SoFar(NamedTuple):
    """A sequence of the next step."""

    ref: SequenceRef
    tokens: Sequence[int]
    """Its prompt and answer so far."""
    most_tokens: int
    """Maximum length of a draft; 0: none."""


@dataclass(slots=True)
class _Known:
    """Text, guesses and luck of one sequence."""

    packed: bytearray = field(default_factory=bytearray)
    """Its tokens, four bytes each."""
    guesses: list[int] = field(default_factory=list)
    """Of the tokens that follow."""
    right: float = _FIRST_RIGHT
    """Share of guesses that were right, as long as those before them were; smoothed."""


class Drafts:
    """Makes drafts of up to `most_tokens` tokens for the sequences of a step."""

    def __init__(self, most_tokens: int) -> None:
        self.kept = self.wrong = 0
        """Computed guesses so far; whoever computes them counts."""
        self._most_tokens = most_tokens
        self._known: OrderedDict[SequenceRef, _Known] = OrderedDict()
        """Of the last `_MOST_KNOWN` sequences."""
        self._step_s = [0.0] * (MOST_ROWS + 1)
        """Seconds of a step by its rows, smoothed; 0: not measured."""

    def make(self, asked: Sequence[SoFar]) -> list[list[int]]:
        """Return a draft for each sequence of a step, empty where none pays."""
        count = len(asked)
        if not 0 < count < MOST_ROWS or not self._step_s[count]:
            return [[] for _ in asked]
        guesses = [self._guesses(one) for one in asked]
        chances = sorted(
            (
                (known.right ** (at + 1), row)
                for row, known in enumerate(guesses)
                for at in range(len(known.guesses))
            ),
            reverse=True,
        )
        tokens, best, taken = float(count), _LEAST_GAIN * count / self._step_s[count], 0
        for rows, (chance, _) in enumerate(chances[: MOST_ROWS - count], count + 1):
            tokens += chance
            if tokens / self._foreseen_s(rows, count) > best:
                best, taken = tokens / self._foreseen_s(rows, count), rows - count
        lengths = [0] * count
        for _, row in chances[:taken]:
            lengths[row] += 1
        return [known.guesses[:length] for known, length in zip(guesses, lengths, strict=True)]

    def on_step(self, rows: int, step_s: float) -> None:
        """Note the duration of a step that only decoded."""
        if not 0 < rows <= MOST_ROWS:
            return
        known = self._step_s
        known[rows] = averaged(known[rows] or None, min(step_s, 3 * known[rows] or step_s), _WEIGHT)
        for other in range(rows + 1, MOST_ROWS + 1):
            if known[other]:
                known[other] += _FORGOTTEN * (known[rows] - known[other])

    def _foreseen_s(self, rows: int, count: int) -> float:
        """Return the duration of a step: measured, or on a line from that of `count` rows through the nearest
        one that was."""
        step_s = self._step_s
        if step_s[rows]:
            return step_s[rows]
        known = (other for other in range(1, MOST_ROWS + 1) if step_s[other] and other != count)
        other = min(known, key=lambda other: abs(other - rows), default=0)
        slope_s = (step_s[other] - step_s[count]) / (other - count) if other else _UNKNOWN_ROW * step_s[count]
        return step_s[count] + max(0.0, slope_s) * (rows - count)

    def _guesses(self, asked: SoFar) -> _Known:
        """Compare the last guesses with what came, and make new ones."""
        known, tokens = self._of(asked.ref), asked.tokens
        packed, first = known.packed, len(known.packed) // _WIDTH
        for guess, token in zip(known.guesses, tokens[first:], strict=False):
            known.right = averaged(known.right, float(guess == token), _WEIGHT)
            if guess != token:
                break
        packed += array("i", tokens[first:]).tobytes()
        known.guesses = []
        most_tokens = min(asked.most_tokens, self._most_tokens)
        for length in _LENGTHS if most_tokens > 0 else ():
            start = _after(packed, length)
            if start is not None:
                for at in range(start, start + most_tokens):  # on into the guesses where they repeat
                    known.guesses.append(tokens[at] if at < len(tokens) else known.guesses[at - len(tokens)])
                break
        return known

    def _of(self, ref: SequenceRef) -> _Known:
        known = self._known.get(ref)
        if known is None:
            known = self._known[ref] = _Known()
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(ref)
        return known


def _after(packed: bytearray, length: int) -> int | None:
    """Return where the tokens begin that followed the last `length` tokens where those stood last before."""
    needle, end = bytes(packed[-length * _WIDTH :]), len(packed) - _WIDTH
    while len(needle) == length * _WIDTH:
        at = packed.rfind(needle, 0, end)
        if at < 0:
            return None
        if at % _WIDTH == 0:
            return at // _WIDTH + length
        end = at + len(needle) - 1
    return None
