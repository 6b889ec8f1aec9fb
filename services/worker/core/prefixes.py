"""Prefix sharing between sequences: block names, hits, prefetches and audits. Pure.

Stands between the table of sequences and the cache. A chunk uses a stored prefix up to the blocks that the
plan allocated. The rest is promised to the scheduler, so that its next chunk starts after it."""

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from services.worker.core.sequence import HeldSequence
from services.worker.kv.core.block_pool import first_borrowed
from services.worker.kv.core.kv_events import StoredEvents
from services.worker.kv.core.prefix_cache import PrefixCache
from services.worker.kv.core.tier_copier import Hit
from shared.blocks import BlockHash, chain, child, root
from shared.messages.plans import PrefixHit
from shared.messages.sequence import TOKEN_BYTES, SequenceSpec, pack_tokens

LOOKAHEAD_SEQUENCES = 64
"""Maximum number of sequences to prefetch for; the oldest are dropped first."""
_SAVED_BLOCKS = 32
"""Maximum number of writes to disk, and to peers, started between two steps."""


class Auditor(Protocol):
    """Compares stored blocks with recomputed ones, for a sample of the hits."""

    def is_due(self) -> bool:
        """Whether to recompute the next hit."""
        ...

    def agree(self, stored: int, computed: int) -> bool:
        """Whether two device blocks are equal up to rounding."""
        ...


class Prefixes:
    """The shared prefixes of one worker. `fingerprint` must agree for KV to be exchanged (`shared.blocks`).
    Without an `auditor`, stored blocks are trusted."""

    def __init__(
        self,
        cache: PrefixCache,
        fingerprint: bytes,
        lookahead_sequences: int = LOOKAHEAD_SEQUENCES,
        auditor: Auditor | None = None,
    ) -> None:
        self.cache = cache
        self._own_ids = cache.ids
        self.fingerprint = fingerprint
        self._expected: deque[list[BlockHash]] = deque(maxlen=lookahead_sequences)
        self._hits: list[PrefixHit] = []
        self._auditor = auditor
        self.doubted: list[tuple[HeldSequence, int]] = []
        """Sequences whose computation disagrees with a stored block, and that block."""
        self.events: StoredEvents | None = None
        """Events for external readers; None: there are none."""
        self.swaps = 0
        """Number of preemptions so far that kept blocks on the host."""

    def expect(self, specs: Iterable[SequenceSpec]) -> None:
        """Prefetch blocks from disk, between steps, for sequences that start soon."""
        if not self.cache.has_disk:
            return
        for spec in specs:
            if len(spec.prompt) % TOKEN_BYTES == 0:
                start = root(self.fingerprint, spec.cache_salt)
                self._expected.append(chain(start, spec.prompt, self.cache.block_tokens))

    def take_hits(self) -> tuple[PrefixHit, ...]:
        """Return the hits since the last call."""
        hits, self._hits = tuple(self._hits), []
        return hits

    def extend(self, sequence: HeldSequence, most_blocks: int) -> None:
        """Give a sequence the stored blocks that come next, up to so many in all; it awaits those that are
        not on the device. Its last token is always computed, for its logits."""
        size = self.cache.block_tokens
        first, rest = divmod(sequence.computed_tokens, size)
        usable = (len(sequence.tokens) - 1) // size
        if rest or first != len(sequence.blocks) or first >= min(usable, most_blocks):
            return
        self._name(sequence, usable)
        names, most = sequence.names[:usable], min(usable, most_blocks)
        is_first = first == 0 and self._auditor is not None
        if sequence.audited or (is_first and self._is_audited(sequence, names[:most])):
            return
        hit = self.cache.acquire(names, most, first, may_load=not sequence.computes_rest)
        if not hit.known_blocks:
            return
        sequence.awaited = hit.awaited
        self._take(sequence, hit)
        known_tokens = (first + hit.known_blocks + hit.ahead) * size
        sequence.promised_tokens = max(sequence.promised_tokens, known_tokens)
        self._hits.append(PrefixHit(ref=sequence.ref, cached_tokens=known_tokens, blocks=hit.loaded))

    def collect(self, sequence: HeldSequence) -> None:
        """End a sequence's wait: it holds the blocks that arrived, and computes the rest."""
        awaited, sequence.awaited, sequence.awaited_until_s = sequence.awaited, None, None
        if awaited is None:
            return
        hit = self.cache.collect(awaited)
        sequence.computes_rest = sequence.computes_rest or len(hit.blocks) < len(awaited.nodes)
        if hit.blocks:
            self._take(sequence, hit)
            self._hits.append(
                PrefixHit(
                    ref=sequence.ref,
                    cached_tokens=sequence.computed_tokens,
                    blocks=hit.loaded,
                    peer_blocks=hit.from_peers,
                )
            )

    def abandon(self, sequence: HeldSequence) -> None:
        """Release the blocks that a sequence waits for."""
        awaited, sequence.awaited, sequence.awaited_until_s = sequence.awaited, None, None
        if awaited is not None:
            self.cache.release(self.cache.collect(awaited).blocks)

    def _take(self, sequence: HeldSequence, hit: Hit) -> None:
        """Append the blocks of a hit to a sequence."""
        size = self.cache.block_tokens
        sequence.blocks.extend(hit.blocks)
        sequence.published_blocks = len(sequence.blocks)
        sequence.computed_tokens = len(sequence.blocks) * size
        if not sequence.sampled:
            cached_tokens = sequence.cached_tokens + len(hit.blocks) * size
            sequence.cached_tokens = min(cached_tokens, sequence.prompt_tokens)

    def publish(self, sequence: HeldSequence) -> None:
        """Name blocks that became full, up to the first that differs from the stored block of that name or
        cannot be compared with it."""
        full = sequence.computed_tokens // self.cache.block_tokens
        self._name(sequence, full)
        last = min(full, first_borrowed(sequence.blocks, self._own_ids)) if sequence.audited else full
        for at in range(sequence.published_blocks, last):
            if sequence.audited and not self._is_confirmed(sequence, at):
                sequence.published_blocks = at
                return
            parent = sequence.names[at - 1] if at else None
            if self.events is not None:
                size = self.cache.block_tokens
                tokens = sequence.tokens[at * size : (at + 1) * size]
                self.events.on_named(sequence.names[at], parent, tokens, sequence.adapter)
            self.cache.publish(sequence.blocks[at], sequence.names[at], parent, sequence.tenant)
        sequence.published_blocks = max(full, sequence.published_blocks)

    def end_audit(self, sequence: HeldSequence) -> None:
        """End the audit of a sequence."""
        if sequence.audited:
            audited, sequence.audited = sequence.audited, []
            self.cache.release(audited)

    def _is_audited(self, sequence: HeldSequence, names: list[BlockHash]) -> bool:
        """Whether the sequence recomputes these stored blocks; that needs room for both."""
        if self._auditor is None or sequence.takes_late or not self._auditor.is_due():
            return False
        sequence.audited = self.cache.hold(names)
        if not self.cache.can_allocate(len(sequence.audited)):
            self.end_audit(sequence)
        return bool(sequence.audited)

    def _is_confirmed(self, sequence: HeldSequence, at: int) -> bool:
        """Whether the stored block agrees with the computed one, which it then replaces."""
        stored, computed = sequence.audited[0], sequence.blocks[at]
        if self._auditor is None or not self._auditor.agree(stored, computed):
            self.doubted.append((sequence, stored))
            return False
        del sequence.audited[0]
        sequence.blocks[at] = stored
        self.cache.release([computed])
        return True

    def keep(self, sequence: HeldSequence) -> None:
        """Keep a sequence's full, own blocks on the host during a preemption, as far as there is room."""
        full = sequence.computed_tokens // self.cache.block_tokens
        if full < len(sequence.kept):
            return
        sequence.published_blocks = 0  # Another copy of the same name may be gone by now.
        self.publish(sequence)
        before = sequence.kept
        own = min(full, first_borrowed(sequence.blocks, self._own_ids))
        sequence.kept = self.cache.keep(sequence.names[:own])
        self.cache.unkeep(before)
        self.swaps += bool(sequence.kept)

    def let_be(self, sequence: HeldSequence) -> None:
        """End `keep` for a sequence that came back or never will."""
        kept, sequence.kept = sequence.kept, []
        self.cache.unkeep(kept)

    def on_prefilled(self, tokens: int, elapsed_s: float) -> None:
        """Note the time that prompt tokens took."""
        self.cache.gate.on_prefilled(tokens / self.cache.block_tokens, elapsed_s)

    def work_ahead(self) -> None:
        """Start copies between two steps; nothing waits for them."""
        self.cache.save_ahead()
        if self.cache.has_peers:
            self.cache.peers.start(_SAVED_BLOCKS)
        if not self.cache.has_disk:
            return
        self.cache.writes.start(_SAVED_BLOCKS)
        needed = {name for names in self._expected for name in names}
        while self._expected:
            names = self._expected[0]
            if self.cache.prefetch(names, len(names), needed) or self.cache.reading:
                return
            self._expected.popleft()

    def _name(self, sequence: HeldSequence, blocks: int) -> None:
        """Compute the names of its first blocks."""
        names, size = sequence.names, self.cache.block_tokens
        name = names[-1] if names else root(self.fingerprint, sequence.cache_salt)
        for at in range(len(names), blocks):
            name = child(name, pack_tokens(sequence.tokens[at * size : (at + 1) * size]))
            names.append(name)
