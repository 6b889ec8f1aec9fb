"""Late tokens: tokens that the former worker computed while a sequence moved to this one. Pure.

The gateway reads the former worker until this one has caught up, and passes the tokens on. They may arrive
before the sequence, or never. See docs/migration.md."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from services.worker.core.sequence import HeldSequence
from shared.messages.plans import Decode, PrefillChunk, ShortStart
from shared.messages.sequence import SequenceRef

MOST_SEQUENCES = 64
MOST_TOKENS = 64
"""Maximum number of late tokens of a sequence."""
_STEPS_ALONE = 3
"""Number of steps without a late token after which none is awaited."""
_LATE_S = 1.0
"""Maximum time to wait for late tokens."""


class Latecomers:
    """Joins late tokens to sequences whose plans left room for them, and reports missing ones."""

    def __init__(self) -> None:
        self._late: dict[str, OrderedDict[SequenceRef, dict[int, int]]] = {}
        """Tokens by gateway and attempt, of at most `MOST_SEQUENCES` of each gateway."""
        self._shorts: list[ShortStart] = []

    def __len__(self) -> int:
        return sum(map(len, self._late.values()))

    def add(self, gateway_id: str, ref: SequenceRef, first_index: int, tokens: Sequence[int]) -> None:
        """Add the answer's tokens from that index on, as that gateway sent them."""
        late = self._late.setdefault(gateway_id, OrderedDict())
        known = late.setdefault(ref, {})
        for index, token in enumerate(tokens, first_index):
            if len(known) < MOST_TOKENS:
                known[index] = token
        while len(late) > MOST_SEQUENCES:
            late.popitem(last=False)

    def miss(self, sequence: HeldSequence, tokens: int) -> None:
        """Report tokens that plans count on and that the sequence lacks."""
        self._shorts.append(ShortStart(ref=sequence.ref, missing_tokens=tokens))

    def take_shorts(self) -> tuple[ShortStart, ...]:
        """Return the reports since the last call."""
        shorts, self._shorts = tuple(self._shorts), []
        return shorts

    def join(self, sequence: HeldSequence, item: PrefillChunk | Decode) -> PrefillChunk | Decode:
        """Append late tokens to a sequence, and return the item extended by them."""
        missing = item.end_token - len(sequence.tokens) if isinstance(item, PrefillChunk) else 0
        if missing < 0:
            return item
        known = self._late.get(sequence.gateway_id, OrderedDict()).get(sequence.ref, {})
        sequence.steps_alone += 1
        while sequence.open_tokens and sequence.generated_tokens in known:
            sequence.tokens.append(known.pop(sequence.generated_tokens))
            sequence.open_tokens -= 1
            sequence.steps_alone = 0
        if sequence.steps_alone > _STEPS_ALONE:
            self._close(sequence)
        if isinstance(item, PrefillChunk):
            return msgspec.structs.replace(item, end_token=len(sequence.tokens))
        return item

    def tick(self, sequences: Iterable[HeldSequence], now_s: float) -> None:
        """Stop waiting for late tokens of sequences that waited too long."""
        for held in sequences:
            if held.open_tokens and held.alive and held.sampled and now_s - held.received_s > _LATE_S:
                self._close(held)

    def close_all(self, sequences: Iterable[HeldSequence]) -> None:
        """Stop waiting for late tokens without reports: a snapshot tells what each sequence has."""
        for held in sequences:
            self._close(held)
        self._shorts.clear()

    def _close(self, sequence: HeldSequence) -> None:
        """Stop taking late tokens for a sequence, and report how many are missing."""
        if sequence.open_tokens:
            self.miss(sequence, sequence.open_tokens)
        sequence.open_tokens = 0
        late = self._late.get(sequence.gateway_id, OrderedDict())
        late.pop(sequence.ref, None)
        if not late:
            self._late.pop(sequence.gateway_id, None)
