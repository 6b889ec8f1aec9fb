"""Which of an epoch's moves go by KV over the link and which by tokens: one two-bin packing (papers/000 §V).

Both boundaries are measured: bytes that a link carries and tokens that a worker prefills within an epoch. The
largest first, each into the cheaper mode that still has room on its way; what fits neither waits for the next
epoch. Deterministic, so that whoever computes it from the same inputs gets the same division. Pure.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    KV = "kv"
    TOKENS = "tokens"
    LATER = "later"


@dataclass(frozen=True, slots=True)
class Migration:
    """One move, and what it weighs either way."""

    name: str
    source: str
    target: str
    kv_bytes: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Boundaries:
    """For one epoch, as measured. A link or worker that is not there has no room."""

    link_bytes: Mapping[tuple[str, str], int]
    prefill_tokens: Mapping[str, int]


def divide(migrations: Iterable[Migration], boundaries: Boundaries) -> dict[str, Mode]:
    """The mode of each, by name. Cheaper: what takes the smaller share of its boundary."""
    links, workers = dict(boundaries.link_bytes), dict(boundaries.prefill_tokens)
    modes: dict[str, Mode] = {}
    for one in sorted(migrations, key=lambda each: (-each.kv_bytes, each.name)):
        way = (one.source, one.target)
        shares = {
            Mode.KV: _share(one.kv_bytes, boundaries.link_bytes.get(way, 0)),
            Mode.TOKENS: _share(one.tokens, boundaries.prefill_tokens.get(one.target, 0)),
        }
        fits = {
            Mode.KV: one.kv_bytes <= links.get(way, 0),
            Mode.TOKENS: one.tokens <= workers.get(one.target, 0),
        }
        able = [mode for mode in (Mode.KV, Mode.TOKENS) if fits[mode]]
        mode = min(able, key=lambda each: shares[each], default=Mode.LATER)
        modes[one.name] = mode
        if mode is Mode.KV:
            links[way] -= one.kv_bytes
        elif mode is Mode.TOKENS:
            workers[one.target] -= one.tokens
    return modes


def _share(amount: int, boundary: int) -> float:
    return amount / boundary if boundary > 0 else float("inf")
