"""The debtor: an engine's `RemoteAttention` over links to the workers that lend it blocks.

For each creditor and step it chooses whether queries or blocks travel, and sends one message per creditor
and layer for the whole batch. A creditor's failure becomes `CreditorLost`. The step can then run again
without the sequences that have blocks there, because a step writes the same values every time. Used on the
engine's thread only. Source: Infinite-LLM §4.2, §4.6 (papers/001), algorithms.md §4.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from services.worker.engine.attention import PagedAttention
from services.worker.engine.paged import Shape
from services.worker.engine.partition import Part
from services.worker.engine.remote import Partial
from services.worker.kv.transfers import Throttle
from services.worker.peers.attention.core.cost import CreditorSpeeds, ShipMode, Work, choose_mode
from services.worker.peers.attention.interfaces import BlockDebtor, LentTier
from services.worker.peers.attention.shares import (
    CreditorMemory,
    FetchedShare,
    LayerInputs,
    NativeShare,
    ShippedShare,
    Staging,
    StepShare,
    work_of,
)
from services.worker.peers.core.neighbours import LinkRates
from shared.clock import Clock, monotonic_s
from shared.errors import KvasirError

Chooser = Callable[[Work, CreditorSpeeds], ShipMode]


@dataclass(slots=True)
class _Active:
    """A creditor's share of the current step, and its way once that is known."""

    share: StepShare
    way: NativeShare | ShippedShare | FetchedShare | None = None


class AttendingDebtor(BlockDebtor):
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
        super().__init__(attention.pools, own_blocks, block_tokens, most_creditors, deadline_s)
        self.staging_blocks = staging_blocks
        self._attention = attention
        self._library = None if any(attention.windows) else attention.library
        """None: no native steps. With windows, a step has one part per window, and parts go by messages."""
        self._q_heads = q_heads
        self._choose = choose
        self._rates = rates or LinkRates()
        self._throttle = Throttle(link_bytes_per_s)
        self._clock = clock
        self._active: list[_Active] = []
        self._given: LayerInputs | None = None
        self._attended_s: float | None = None
        attention.extend(self.homes, self)

    def _lent(self, of: LentTier) -> CreditorMemory:
        speeds = CreditorSpeeds(self._rates.link(of.link.peer.worker_id, of.link.transport))
        staging = Staging(self._attention, self.staging_blocks)
        return CreditorMemory(of.link, of.grants, of.tier, of.attends, speeds, staging, self.deadline_s)

    def begin(self, parts: Sequence[Part]) -> None:
        self._active.clear()
        self._attended_s = None
        self.watch.on_step(parts)
        shares = [self._share(self._lendings[part.holder], part, next(self._numbers)) for part in parts]
        modes = [self._mode(share) for share in shares]
        for share, mode in zip(shares, modes, strict=True):
            active = _Active(share)
            self._active.append(active)
            if mode is ShipMode.FETCH:
                active.way = self._fetched(share)
            elif self._library is None or not share.lending.is_native:
                active.way = ShippedShare(share)
            else:
                announce = partial(share.lending.announce, self._library, self._q_heads)
                self._guarded(share.lending.link, announce)
                if share.lending.is_exchanging:
                    active.way = self._opened(share)

    def send(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, shape: Shape) -> None:
        now_s, self._given = self._clock(), (queries, keys, values, shape)
        for active in self._of_layer(layer):
            if self._attended_s is not None:
                active.share.lending.speeds.on_layer(now_s - self._attended_s)
            way = active.way = active.way or self._opened(active.share)
            self._guarded(active.share.lending.link, partial(way.send, layer, self._given))

    def collect(self, layer: int) -> Iterator[Partial]:
        """See `RemoteAttention`. Shipped queries come first: their answers need no local work."""
        for active in sorted(self._of_layer(layer), key=lambda each: isinstance(each.way, FetchedShare)):
            for part in self._collected(active, layer):
                self._throttle.wait(2 * part[1].nbytes)  # Queries there, outputs back.
                yield part
        self._attended_s = self._clock()

    def end(self) -> None:
        for active in self._active:
            if isinstance(active.way, NativeShare | FetchedShare):
                self._guarded(active.share.lending.link, active.way.end)
        self._active.clear()
        self._given = None

    def abandon(self) -> None:
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

    def _opened(self, share: StepShare) -> NativeShare | ShippedShare | FetchedShare:
        """Choose the way by the creditor's answer to the announcement."""
        link = share.lending.link
        asker = self._guarded(link, share.lending.exchange)
        if asker is not None:
            return self._guarded(link, partial(NativeShare, share, asker))
        return self._fetched(share) if share.lending.is_native else ShippedShare(share)

    def _collected(self, active: _Active, layer: int) -> Iterator[Partial]:
        way, link = active.way, active.share.lending.link
        assert way is not None and self._given is not None
        if isinstance(way, FetchedShare):
            parts = way.collect(layer)
        else:
            found = self._guarded(link, way.collect)
            if found is not None:
                yield found
                return
            active.way = fetched = self._fetched(active.share)
            if isinstance(way, NativeShare):
                self._guarded(link, partial(fetched.send, layer, self._given))
                parts = fetched.collect(layer)
            else:
                parts = fetched.attend_again(layer, self._given)
        while (part := self._guarded(link, partial(next, parts, None))) is not None:
            yield part

    def _of_layer(self, layer: int) -> list[_Active]:
        """Return the shares of the layer's window."""
        window = self._attention.windows[layer]
        return [active for active in self._active if active.share.part.spans.window_tokens == window]

    def _share(self, lending: CreditorMemory, part: Part, step: int) -> StepShare:
        return StepShare(lending, part, step, self._clock)

    def _fetched(self, share: StepShare) -> FetchedShare:
        """Return a fetched share. It fetches a layer ahead if all layers have the same part."""
        windows = self._attention.windows
        return FetchedShare(share, self.block_tokens, len(windows) if len(set(windows)) == 1 else 0)

    def _mode(self, share: StepShare) -> ShipMode:
        if not share.lending.attends:
            return ShipMode.FETCH
        pools = self._attention.pools[0]
        work = work_of(share, q_heads=self._q_heads, pools=pools, block_tokens=self.block_tokens)
        return self._choose(work, share.lending.speeds)
