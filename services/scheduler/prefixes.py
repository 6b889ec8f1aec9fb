"""What a waiting prompt's blocks are called, so that placement can tell who has them already. Pure.

Names depend on what computes them: there is one chain for each fingerprint and block size among the workers.
"""

from collections.abc import Iterable

from services.scheduler.state import Sequence
from shared.blocks import chain, root
from shared.messages.prefixes import MOST_CHAIN_BLOCKS, PrefixChain
from shared.messages.reports import WorkerReported
from shared.messages.sequence import TOKEN_BYTES, SequenceSpec

MOST_KINDS = 4
"""Of workers whose names travel with one prompt."""

Kind = tuple[bytes, int]
"""Fingerprint, tokens in a block."""


def kinds_of(reports: Iterable[WorkerReported]) -> tuple[Kind, ...]:
    """Of the workers that share blocks, each once, in an order that does not depend on theirs."""
    kinds = {(report.fingerprint, report.block_tokens) for report in reports if report.caches_prefixes}
    return tuple(sorted(kinds)[:MOST_KINDS])


def names_of(sequence: Sequence, kinds: tuple[Kind, ...]) -> tuple[PrefixChain, ...]:
    """Computed once for the same kinds; nothing for a sequence whose prompt is not known."""
    if sequence.spec is None or not kinds:
        return ()
    known = sequence.prefixes
    if known is None or known[0] != kinds:
        known = sequence.prefixes = (kinds, tuple(_chain(sequence.spec, kind) for kind in kinds))
    return known[1]


def _chain(spec: SequenceSpec, kind: Kind) -> PrefixChain:
    fingerprint, block_tokens = kind
    most_bytes = MOST_CHAIN_BLOCKS * block_tokens * TOKEN_BYTES
    names = chain(root(fingerprint, spec.cache_salt), spec.prompt[:most_bytes], block_tokens)
    return PrefixChain(block_tokens=block_tokens, names=b"".join(names))
