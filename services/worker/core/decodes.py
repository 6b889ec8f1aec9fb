"""Decodes that continue from step to step, one row per sequence, as arrays. Pure.

A `DecodeGroup` has what stays the same while its sequences decode together, and a `DecodeBatch` is one step
of it. Only plain sequences are in groups: the others are prepared and committed one by one."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from services.worker.core.sampling import Sampled, SamplePoint
from services.worker.core.sequence import HeldSequence
from services.worker.kv.core.block_pool import joined, starts
from shared.messages.reports import SequenceState
from shared.messages.sequence import Sampling, SequenceRef

Int64s = npt.NDArray[np.int64]
_POSITION = attrgetter("next_position")


def is_plain(sequence: HeldSequence) -> bool:
    """Whether a sequence that has sampled a token may be in groups."""
    sampling = sequence.sampling
    return (
        sequence.state is SequenceState.DECODING
        and sampling.top_logprobs is None
        and not (sequence.rehearsal or sequence.open_tokens or sequence.audited or sequence.kept)
        and not (sampling.forced or sampling.embeds or sequence.is_put_off)
    )


def by_length(sequences: Iterable[HeldSequence]) -> list[HeldSequence]:
    """Return sequences by context length, as engines that pad tables want them."""
    return sorted(sequences, key=_POSITION)


class SteadyGroup:
    """Sequences that decode together. It is valid until one of them ends, loses its blocks
    or gets more of them."""

    def __init__(self, sequences: list[HeldSequence], block_tokens: int, revision: int) -> None:
        """`revision`: the table's, see `SequenceTable.revision`."""
        self.sequences = sequences
        self.revision = revision
        self.block_tokens = block_tokens
        tables = [sequence.blocks for sequence in sequences]
        self.blocks = joined(tables)
        """int32: all block tables, one after the other."""
        self.table_blocks = np.fromiter(map(len, tables), np.int32, len(tables))
        """`[rows]`: number of blocks of each table."""
        self.samplings: list[Sampling] = [sequence.sampling for sequence in sequences]
        self.prompts = _int64([sequence.prompt_tokens for sequence in sequences])
        self.limits = _int64([sequence.limit_tokens for sequence in sequences])
        self.end_tokens = sorted(set().union(*{sampling.end_token_ids for sampling in self.samplings}))
        first = _int64(list(map(_POSITION, sequences)))
        self.first = DecodeBatch(self, first, _int64([sequence.tokens[-1] for sequence in sequences]))
        room = self.table_blocks * block_tokens - first
        self._last_position = int(first[-1] + room.min()) - 1
        """Of the longest sequence, in the last step for which every table has room."""
        self._last_ahead = int(first[-1] + (self.limits - first).min()) - 2
        """The same, in the last step that may begin before the tokens of the step before it are known."""
        self.refs: list[SequenceRef] = [sequence.ref for sequence in sequences]
        self.engine_note: tuple[bool, int] | None = None
        """What the engine notes about the group."""

    def __len__(self) -> int:
        return len(self.sequences)

    @cached_property
    def table_start(self) -> npt.NDArray[np.int32]:
        """`[rows + 1]`: offset of each table in `blocks`, and the end of the last one."""
        return starts(self.table_blocks)

    @cached_property
    def rows(self) -> npt.NDArray[np.int32]:
        """`[rows + 1]`: 0, 1, 2 and so on."""
        return np.arange(len(self) + 1, dtype=np.int32)

    @cached_property
    def zeros(self) -> npt.NDArray[np.int32]:
        """`[rows]`."""
        return np.zeros(len(self), dtype=np.int32)

    @cached_property
    def names(self) -> tuple[list[str], list[int], list[int], list[int]]:
        """Request, choice, attempt and number of cached prompt tokens of each sequence, for frames."""
        refs = self.refs
        requests = [ref.request_id for ref in refs]
        cached = [sequence.cached_tokens for sequence in self.sequences]
        return requests, [ref.choice for ref in refs], [ref.attempt for ref in refs], cached

    @cached_property
    def gateways(self) -> dict[str, list[int]]:
        """Rows of each gateway."""
        found: dict[str, list[int]] = {}
        for row, sequence in enumerate(self.sequences):
            found.setdefault(sequence.gateway_id, []).append(row)
        return found

    def goes_on(self, batch: "DecodeBatch") -> bool:
        """Whether every row has a next step after that one, as far as is known."""
        last = int(batch.first[-1])
        return last < self._last_position and (batch.sampled is not None or last < self._last_ahead)

    def points(self, batch: "DecodeBatch") -> list[SamplePoint]:
        """Return the points of a step's rows."""
        indices = (batch.first + 1 - self.prompts).tolist()
        return [
            SamplePoint(sequence.sampling, sequence.ref.choice, index, sequence.tokens)
            for sequence, index in zip(self.sequences, indices, strict=True)
        ]


class DecodeBatch:
    """One step of a group: row `i` computes the token at position `first[i]`, and samples the next one."""

    def __init__(self, group: SteadyGroup, first: Int64s, tokens: Int64s) -> None:
        self.group = group
        self.first = first
        self.tokens = tokens
        """int64 `[rows]`: the tokens to compute; those of sequences in flight are not known yet."""
        self.sampled: Int64s | None = None
        """The tokens that followed, once they are committed."""
        self.told: list[int] = []
        """The same as a list."""

    def __len__(self) -> int:
        return len(self.first)

    def next(self) -> "DecodeBatch":
        """Return the group's next step."""
        return DecodeBatch(self.group, self.first + 1, self.tokens if self.sampled is None else self.sampled)

    def only(self, rows: list[int], revision: int) -> "DecodeBatch":
        """Return the batch with some of its rows."""
        group = SteadyGroup([self.group.sequences[row] for row in rows], self.group.block_tokens, revision)
        return DecodeBatch(group, self.first[rows], self.tokens[rows])

    def begin(self) -> None:
        """Note in each sequence that the step has begun."""
        for sequence, at in zip(self.group.sequences, self.first.tolist(), strict=True):
            sequence.begun_tokens = at + 1

    def commit(self, tokens: Int64s) -> tuple[list[HeldSequence], list[HeldSequence]]:
        """Append the tokens. Return the sequences with a block that became full, and those that may be
        complete."""
        group, self.sampled = self.group, tokens
        self.told = tokens.tolist()
        for sequence, token in zip(group.sequences, self.told, strict=True):
            sequence.tokens.append(token)
            sequence.computed_tokens += 1
        computed = self.first + 1
        due = computed + 1 >= group.limits
        for end_token in group.end_tokens:
            due |= tokens == end_token
        full = np.flatnonzero(computed % group.block_tokens == 0)
        return [group.sequences[row] for row in full], [group.sequences[row] for row in np.flatnonzero(due)]


class StepTokens(Sequence[Sampled | None]):
    """Tokens of a step's rows: the decodes' as an array, then those of the other rows."""

    def __init__(self, decodes: Int64s, others: Sequence[Sampled | None]) -> None:
        self.decodes = decodes
        """int64 `[rows of the batch]`; negative: the row's logits were not finite."""
        self.others = others

    def __len__(self) -> int:
        return len(self.decodes) + len(self.others)

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        rows = len(self.decodes)
        if at < 0 or at >= rows:
            return self.others[at - rows if at >= 0 else at]
        token = int(self.decodes[at])
        return Sampled(token) if token >= 0 else None


def as_array(tokens: Sequence[Sampled | None]) -> Int64s | None:
    """Return tokens of decodes as an array; None if one of them needs more than that."""
    plain = [each for each in tokens if each is not None and each.logprobs is None and each.state is None]
    found = [each.token for each in plain]
    return _int64(found) if len(found) == len(tokens) and min(found, default=0) >= 0 else None


def _int64(numbers: list[int]) -> Int64s:
    return np.array(numbers, dtype=np.int64)
