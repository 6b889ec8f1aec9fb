"""Lending between engines whose KV are the tokens themselves: the lent memory, and access to borrowed blocks.

The messages are those of `debtor` and `creditor` with one layer and no queries. A part's description brings
tokens in place of keys and values; the answer is the sum that each span sees. Where the creditor does not
compute, blocks travel. The engine determines what that costs. Knows no sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from services.worker.engine.contract import SeenTokens, TokenEngine
from services.worker.engine.partition import Part
from services.worker.engine.simulated import token_sums
from services.worker.engine.spans import PackedSpans
from services.worker.kv.tiers.records import LayerPools
from services.worker.peers.attention.interfaces import BlockDebtor, Brought, LentBlocks, LentTier
from services.worker.peers.attention.messages import (
    ATTEND,
    FETCH,
    Request,
    read_answer,
    request_encoder,
    to_wire,
)
from services.worker.peers.transport.base import Buffer, bytes_of
from services.worker.peers.transport.link import Call
from shared.errors import InvalidMessage, KvasirError

_ONE_HEAD = 1
"""Query heads of a request that attends."""


@dataclass
class TokenMemory(LentBlocks):
    """`LentBlocks` of one tier. Without seals: debtors know the content."""

    tokens: npt.NDArray[np.int32]
    """`[blocks, block_tokens]`."""
    engine: TokenEngine
    attends: bool = True
    pools: LayerPools = field(init=False)

    def __post_init__(self) -> None:
        self.pools = [(self.tokens,)]

    @property
    def blocks(self) -> int:
        return len(self.tokens)

    def sizes_bytes(self, asked: Request, rows: int, kept: int) -> list[int]:
        if asked.q_heads > _ONE_HEAD:
            raise InvalidMessage(f"{asked.q_heads} query heads where there is one")
        return [kept * self.tokens.itemsize]

    def write(self, asked: Request, brought: Brought, slots: npt.NDArray[np.int64]) -> None:
        self.tokens.reshape(-1)[slots] = brought[-1].view(np.int32)

    def attend(self, asked: Request, spans: PackedSpans, brought: Brought) -> list[Buffer]:
        return [bytes_of(token_sums(self.tokens, spans))]

    def served_s(self, spans: PackedSpans, *, is_busy: bool) -> float:
        """Serve decodes. Prefill chunks cost their debtor the same as without a creditor."""
        seen = spans.key_end[np.diff(spans.first_row) == 1]
        return self.engine.serve(int(seen.sum()), is_busy=is_busy)

    def copy(self, layer: int, blocks: npt.NDArray[np.int32]) -> list[Buffer]:
        return [bytes_of(self.tokens[blocks])]


@dataclass(slots=True)
class _Share:
    """One lender's part of the current step."""

    lender: LentTier
    part: Part
    step: int
    call: Call | None = None
    sums: npt.NDArray[np.uint32] | None = None

    def request(self, *, q_heads: int = 0, indices: bytes = b"", write_layer: int = -1) -> bytes:
        request = Request(
            step=self.step,
            layer=0,
            grants=self.lender.grants,
            tier=self.lender.tier,
            part=to_wire(self.part.spans),
            q_heads=q_heads,
            indices=indices,
            write_layer=write_layer,
        )
        return request_encoder.encode(request)


class TokenDebtor(BlockDebtor):
    """`BlockDebtor` and `RemoteTokens` of one engine."""

    _lendings: dict[int, LentTier]

    def __init__(self, engine: TokenEngine, *, most_creditors: int = 8, deadline_s: float = 2.0) -> None:
        super().__init__(engine.pools, engine.own_ids, engine.block_tokens, most_creditors, deadline_s)
        self._shares: Sequence[_Share] = ()
        self._engine = engine
        engine.extend(self.homes, self)

    def attend(self, parts: Sequence[Part], tokens: npt.NDArray[np.int32]) -> list[SeenTokens]:
        """See `RemoteTokens`. Asks all lenders before it waits for one."""
        self.watch.on_step(parts)
        shares = [_Share(self._lendings[part.holder], part, next(self._numbers)) for part in parts]
        self._shares = shares
        asked = [share for share in shares if share.lender.attends]
        for share in asked:
            self._guarded(share.lender.link, partial(self._ask, share, tokens))
        for share in asked:
            self._guarded(share.lender.link, partial(self._take, share))
        return [self._seen(share, tokens) for share in shares]

    def _ask(self, share: _Share, tokens: npt.NDArray[np.int32]) -> None:
        part = share.part
        share.sums = np.zeros(len(part.spans.key_end), dtype=np.uint32)
        request = share.request(q_heads=_ONE_HEAD)
        kept = [bytes_of(tokens[part.rows[part.kept]])]
        into = [bytes_of(share.sums)]
        share.call = share.lender.link.begin(ATTEND, request, kept, into=into, deadline_s=self.deadline_s)

    def _take(self, share: _Share) -> None:
        """Take a lender's sums; none when its time budget is used up. The tokens were written."""
        call, share.call = share.call, None
        assert call is not None
        answer = call.finish()
        if read_answer(answer.header).over_budget or answer.buffers != 1:
            share.sums = None

    def _seen(self, share: _Share, tokens: npt.NDArray[np.int32]) -> SeenTokens:
        if share.sums is not None:
            return SeenTokens(share.sums, is_copied=False)
        part, lender = share.part, share.lender
        new = () if lender.attends else (bytes_of(tokens[part.rows[part.kept]]),)
        rows = np.empty((part.seen_keys, self._engine.block_tokens), dtype=np.int32)
        self._guarded(lender.link, partial(self._fetch, share, rows, new))
        places = replace(part.spans, blocks=np.arange(part.seen_keys, dtype=np.int32))
        return SeenTokens(token_sums(rows, places), is_copied=True)

    def _fetch(self, share: _Share, into: npt.NDArray[np.int32], new: Sequence[Buffer]) -> None:
        """Fetch all blocks of a share, after the creditor has stored `new`."""
        indices = np.arange(share.part.seen_keys, dtype=np.int32).tobytes()
        request = share.request(indices=indices, write_layer=0 if new else -1)
        share.lender.link.ask(FETCH, request, new, into=[bytes_of(into)], deadline_s=self.deadline_s)

    def abandon(self) -> None:
        shares, self._shares = self._shares, ()
        for share in shares:
            call, share.call = share.call, None
            if call is None or share.lender.link.closed:
                continue
            try:
                call.finish()
            except KvasirError:
                share.lender.link.close()
