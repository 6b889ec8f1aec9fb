"""Tokens that come after their sequence: what its former worker computed while it changed workers. Pure.

The gateway, which reads the former worker until this one has caught up, passes them on. They may come before
the sequence does, and some may never come. docs/migration.md.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from services.worker.core.sequence import HeldSequence
from shared.messages.plans import Decode, PrefillChunk, ShortStart
from shared.messages.sequence import SequenceRef

MOST_SEQUENCES = 64
MOST_TOKENS = 64
"""Of one of them."""
_STEPS_ALONE = 3
"""After so many without a late token none is waited for any more."""
_LATE_S = 1.0
"""Nor after so long."""


class LateTokens:
    """By gateway and attempt; of too many sequences of one gateway the first is forgotten."""

    def __init__(self) -> None:
        self._late: dict[str, OrderedDict[SequenceRef, dict[int, int]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._late.values()))

    def add(self, gateway_id: str, ref: SequenceRef, first_index: int, tokens: Sequence[int]) -> None:
        """These are the answer's tokens from that index on, as that gateway says."""
        late = self._late.setdefault(gateway_id, OrderedDict())
        known = late.setdefault(ref, {})
        for index, token in enumerate(tokens, first_index):
            if len(known) < MOST_TOKENS:
                known[index] = token
        while len(late) > MOST_SEQUENCES:
            late.popitem(last=False)

    def take(self, gateway_id: str, ref: SequenceRef, first_index: int, most: int) -> list[int]:
        """Those that follow without a gap, at most so many, once; what other gateways say does not count."""
        known = self._late.get(gateway_id, OrderedDict()).get(ref, {})
        found: list[int] = []
        while len(found) < most and first_index + len(found) in known:
            found.append(known.pop(first_index + len(found)))
        return found

    def forget(self, gateway_id: str, ref: SequenceRef) -> None:
        """It has all that it takes."""
        late = self._late.get(gateway_id)
        if late is not None:
            late.pop(ref, None)
            if not late:
                del self._late[gateway_id]


class Latecomers:
    """Joins such tokens to the sequences whose plans left room for them, and tells what did not come."""

    def __init__(self) -> None:
        self._tokens = LateTokens()
        self._shorts: list[ShortStart] = []

    def add(self, gateway_id: str, ref: SequenceRef, first_index: int, tokens: Sequence[int]) -> None:
        """These are the answer's tokens from that index on, as that gateway says."""
        self._tokens.add(gateway_id, ref, first_index, tokens)

    def miss(self, sequence: HeldSequence, tokens: int) -> None:
        """Plans count on so many that it has not."""
        self._shorts.append(ShortStart(ref=sequence.ref, missing_tokens=tokens))

    def take_shorts(self) -> tuple[ShortStart, ...]:
        """Since the last call."""
        shorts, self._shorts = tuple(self._shorts), []
        return shorts

    def join(self, sequence: HeldSequence, item: PrefillChunk | Decode) -> PrefillChunk | Decode:
        """With the tokens that came since, for which its plan left room, from its last chunk on."""
        missing = item.end_token - len(sequence.tokens) if isinstance(item, PrefillChunk) else 0
        if missing < 0:
            return item
        late = self._tokens.take(
            sequence.gateway_id, sequence.ref, sequence.generated_tokens, sequence.open_tokens
        )
        sequence.tokens += late
        sequence.open_tokens -= len(late)
        sequence.steps_alone = 0 if late else sequence.steps_alone + 1
        if sequence.steps_alone > _STEPS_ALONE:
            self._close(sequence)
        if isinstance(item, PrefillChunk):
            return msgspec.structs.replace(item, end_token=len(sequence.tokens))
        return item

    def tick(self, sequences: Iterable[HeldSequence], now_s: float) -> None:
        """Let time pass: who has waited for long takes no more."""
        for held in sequences:
            if held.open_tokens and held.alive and held.sampled and now_s - held.received_s > _LATE_S:
                self._close(held)

    def close_all(self, sequences: Iterable[HeldSequence]) -> None:
        """Whoever asks anew knows what each has: nothing comes late any more, and nothing is told of it."""
        for held in sequences:
            self._close(held)
        self._shorts.clear()

    def _close(self, sequence: HeldSequence) -> None:
        """It takes no more late tokens; its scheduler has to know how many did not come."""
        if sequence.open_tokens:
            self.miss(sequence, sequence.open_tokens)
        sequence.open_tokens = 0
        self._tokens.forget(sequence.gateway_id, sequence.ref)
