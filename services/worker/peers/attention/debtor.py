"""The debtor: an engine's `RemoteAttention` over links to the workers that lend it blocks.

For each creditor and step it chooses whether queries or blocks travel, and sends one message per creditor
and layer for the whole batch. A creditor's failure becomes `CreditorLost`. The step can then run again
without the sequences that have blocks there, because a step writes the same values every time. Used on the
engine's thread only. Knows neither sequences nor grants' owners. Source: Infinite-LLM §4.2, §4.6
(papers/001), algorithms.md §4.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from services.worker.engine.attention import PagedAttention
from services.worker.engine.backends import Pools
from services.worker.engine.paged import Shape
from services.worker.engine.partition import Part, whole
from services.worker.engine.remote import Partial
from services.worker.kv.transfers import Throttle
from services.worker.peers.attention.core.cost import CreditorSpeeds, ShipMode, Work, choose_mode
from services.worker.peers.attention.interfaces import BlockDebtor, LentTier, creditor_lost
from services.worker.peers.attention.shares import (
    CreditorMemory,
    FetchedShare,
    LayerReader,
    NativeShare,
    ShippedShare,
    StepShare,
    TakeBlocks,
    into_rows,
    visit_blocks,
    work_of,
)
from services.worker.peers.attention.staging import Staging
from services.worker.peers.core.neighbours import LinkRates
from services.worker.peers.transport.base import PeerLink
from shared.clock import Clock, monotonic_s
from shared.errors import KvasirError
from shared.messages.lending import KvTier

T = TypeVar("T")
Chooser = Callable[[Work, CreditorSpeeds], ShipMode]


@dataclass(slots=True)
class _Active:
    """A creditor's share of the current step: native, shipped or fetched."""

    share: StepShare
    native: NativeShare | None = None
    shipped: ShippedShare | None = None
    fetched: FetchedShare | None = None

    @property
    def way(self) -> NativeShare | ShippedShare | FetchedShare | None:
        return self.native or self.shipped or self.fetched


class Debtor(BlockDebtor):
    """Remote attention of one engine. Each holder has its own staging and measured speeds."""

    _lendings: dict[int, CreditorMemory]

    def __init__(
        self,
        attention: PagedAttention,
        *,
        q_heads: int,
        own_blocks: int,
        block_tokens: int,
        staging_blocks: int,
        most_creditors: int = 8,
        deadline_s: float = 2.0,
        choose: Chooser = choose_mode,
        rates: LinkRates | None = None,
        link_bytes_per_s: float = 0.0,
        clock: Clock = monotonic_s,
    ) -> None:
        """`staging_blocks`: in each half of a creditor's staging. `rates`: the worker's table of link speeds.

        Raises ConfigError where parts cannot be joined."""
        super().__init__(own_blocks, block_tokens, most_creditors, deadline_s)
        self.staging_blocks = staging_blocks
        self._attention = attention
        self._library = attention.library
        self._has_windows = any(attention.windows)
        """A step has one part per window then, and parts go by messages."""
        self._q_heads = q_heads
        self._choose = choose
        self._rates = rates or LinkRates()
        self._throttle = Throttle(link_bytes_per_s)
        self._clock = clock
        self._active: list[_Active] = []
        self._given: tuple[torch.Tensor, torch.Tensor, torch.Tensor, Shape] | None = None
        self._attended_s: float | None = None
        self.modes = {ShipMode.SHIP: 0, ShipMode.FETCH: 0}
        """Number of parts by way since the start."""
        attention.extend(self.homes, self)

    def _lent(self, what: LentTier) -> CreditorMemory:
        return self._memory(what, self._rates)

    def _memory(self, what: LentTier, rates: LinkRates) -> CreditorMemory:
        link = what.link
        speeds = CreditorSpeeds(rates.link(link.peer.worker_id, link.transport))
        staging = Staging(self._attention, self.staging_blocks)
        return CreditorMemory(link, what.grants, what.tier, what.attends, speeds, staging, self.deadline_s)

    def speeds(self, holder: int) -> CreditorSpeeds:
        return self._lendings[holder].speeds

    def begin(self, parts: Sequence[Part]) -> None:
        self._active.clear()
        self._attended_s = None
        self.watch.on_step(parts)
        shares = [self._share(part) for part in parts]
        modes = [self._mode(share) for share in shares]
        for share, mode in zip(shares, modes, strict=True):
            self.modes[mode] += 1
            active = _Active(share)
            self._active.append(active)
            if mode is ShipMode.FETCH:
                active.fetched = self._fetched(share)
            elif self._library is None or self._has_windows or not share.lending.is_native:
                active.shipped = ShippedShare(share)
            else:
                self._guarded(active, partial(share.lending.announce, self._library, self._q_heads))
                if share.lending.is_exchanging:
                    self._open(active)

    def send(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, shape: Shape
    ) -> None:
        now_s = self._clock()
        for active in self._of_layer(layer):
            if self._attended_s is not None:
                active.share.lending.speeds.on_layer(now_s - self._attended_s)
            if active.way is None:
                self._open(active)
            way = active.way
            assert way is not None
            self._guarded(active, partial(way.send, layer, queries, keys, values, shape))
        self._given = queries, keys, values, shape

    def collect(self, layer: int) -> Iterator[Partial]:
        """See `RemoteAttention`. Shipped queries come first: their answers need no local work."""
        for active in sorted(self._of_layer(layer), key=lambda active: active.fetched is not None):
            for part in self._collected(active, layer):
                self._throttle.wait(2 * part[1].nbytes)  # Queries there, outputs back.
                yield part
        self._attended_s = self._clock()

    def end(self) -> None:
        for active in self._active:
            if active.native is not None:
                active.native.end()
            if active.fetched is not None:
                self._guarded(active, active.fetched.end)
        self._active.clear()
        self._given = None

    def abandon(self) -> None:
        """See `RemoteAttention`. Reads the answers under way, so that links stay usable."""
        actives, self._active = self._active, []
        self._given = None
        for active in actives:
            lending, way = active.share.lending, active.way
            if lending.link.closed:
                continue
            try:
                lending.exchange() if way is None else way.drain()
            except KvasirError:
                lending.link.close()

    def bring_home(self, pairs: Sequence[tuple[int, int]]) -> None:
        pools = self._attention.pools

        def copy(layer: int, at: Sequence[int], staged: Pools) -> None:
            into = torch.tensor([pairs[each][1] for each in at])
            for pool, part in zip(pools[layer], staged, strict=True):
                pool[into] = part[: len(at)].to(pool.device)

        self._visit([there for there, _ in pairs], copy)

    def read(self, blocks: Sequence[int], rows: npt.NDArray[np.uint8]) -> None:
        self._visit(blocks, into_rows(rows, self._attention.pools))

    def reader(self, link: PeerLink, tier: KvTier) -> "LayerReader":
        memory = self._memory(LentTier(link, (), tier, attends=True), LinkRates())
        return LayerReader(memory, self._attention.pools, self.block_tokens, self._clock)

    def _visit(self, blocks: Sequence[int], take: TakeBlocks) -> None:
        """Fetch all layers of blocks and call `take` with each piece. Raises CreditorLost."""
        holders, there = self.homes.locate(blocks)
        for holder in np.unique(holders).tolist():
            at = np.flatnonzero(holders == holder).tolist()
            share = self._share(whole(holder, there[at], self.block_tokens))
            layers = len(self._attention.pools)
            self._guarded(_Active(share), partial(visit_blocks, share, at, layers, take))

    def _open(self, active: _Active) -> None:
        """Choose the way by the creditor's answer to the announcement."""
        share = active.share
        asker = self._guarded(active, share.lending.exchange)
        if asker is not None:
            active.native = self._guarded(active, partial(NativeShare, share, asker))
        elif share.lending.is_native:
            active.fetched = self._fetched(share)
        else:
            active.shipped = ShippedShare(share)

    def _collected(self, active: _Active, layer: int) -> Iterator[Partial]:
        parts: Iterator[Partial]
        if active.native is not None:
            found = self._guarded(active, active.native.collect)
            if found is not None:
                yield found
                return
            active.native, active.fetched = None, self._fetched(active.share)
            assert self._given is not None
            self._guarded(active, partial(active.fetched.send, layer, *self._given))
            parts = active.fetched.collect(layer)
        elif active.shipped is not None:
            found = self._guarded(active, active.shipped.collect)
            if found is not None:
                yield found
                return
            active.shipped, active.fetched = None, self._fetched(active.share)
            assert self._given is not None
            parts = active.fetched.attend_again(layer, *self._given)
        else:
            assert active.fetched is not None
            parts = active.fetched.collect(layer)
        while True:
            part = self._guarded(active, partial(next, parts, None))
            if part is None:
                return
            yield part

    def _guarded(self, active: _Active, call: Callable[[], T]) -> T:
        """Turn a creditor's error into CreditorLost, and close its link."""
        try:
            return call()
        except KvasirError as error:
            link = active.share.lending.link
            link.close()
            self.abandon()
            raise creditor_lost(link, error) from error

    def _of_layer(self, layer: int) -> list[_Active]:
        """Return the shares of the layer's window."""
        window = self._attention.windows[layer]
        return [active for active in self._active if active.share.part.spans.window_tokens == window]

    def _share(self, part: Part) -> StepShare:
        return StepShare(self._lendings[part.holder], part, next(self._numbers), self._clock)

    def _fetched(self, share: StepShare) -> FetchedShare:
        """Return a fetched share. It fetches a layer ahead if all layers have the same part."""
        windows = self._attention.windows
        return FetchedShare(share, self.block_tokens, len(windows) if len(set(windows)) == 1 else 0)

    def _mode(self, share: StepShare) -> ShipMode:
        if not share.lending.attends:
            return ShipMode.FETCH
        return self._choose(self._work(share), share.lending.speeds)

    def _work(self, share: StepShare) -> Work:
        pools = self._attention.pools[0]
        return work_of(share, q_heads=self._q_heads, pools=pools, block_tokens=self.block_tokens)
