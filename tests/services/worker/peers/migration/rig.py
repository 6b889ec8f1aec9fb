"""Two workers' engines, caches and bulk planes in one process: real KV, real links, no bus."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

from services.worker.core.steps import StepCore
from services.worker.door import Door
from services.worker.kv.core.settings import PrefixCacheConfig
from services.worker.kv.tiers.records import Records
from services.worker.peers.engine_calls import CacheDoor
from services.worker.peers.migration.settings import TransferConfig
from services.worker.peers.migration.source import BlockSource
from services.worker.peers.migration.target import Target
from services.worker.peers.registry import Registry
from services.worker.peers.transport.base import Peer, PeerLink
from services.worker.peers.transport.plane import PeerAddress, Plane
from services.worker.peers.transport.tcp import TcpTransport
from tests.services.worker.prefix_rig import BLOCK_TOKENS, PrefixRig, make_engine

LONGEST_S = 10.0


class EngineDoor(Door):
    """A door with a thread behind it that serves at once, except during a long step.

    One thread at a time uses the cache in these tests."""

    def __init__(self) -> None:
        super().__init__(cast(StepCore, None), lambda: 0.0, lambda effects: None)
        self._step_over = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def begin_long_step(self) -> None:
        """Make all further calls wait for `end_long_step`."""
        self._step_over.clear()
        self.give(lambda core, now_s: self._step_over.wait(LONGEST_S))

    def end_long_step(self) -> None:
        """End the step, and wait until all waiting calls have run."""
        self._step_over.set()
        self.give(lambda core, now_s: None).result(LONGEST_S)

    def close(self) -> None:
        self._step_over.set()
        self._closing = True
        self._thread.join(LONGEST_S)

    def _run(self) -> None:
        while not self._closing:
            self.run_waiting(0.02)


class Dialler:
    """Replaces a `Registry`: gets tickets directly from the other's desk."""

    def __init__(self, plane: Plane, others: dict[str, Plane]) -> None:
        self.plane, self.others, self.rates = plane, others, plane.choice.rates

    async def dial(self, worker_id: str, incarnation: int) -> PeerLink:
        other = self.others[worker_id]

        async def issue() -> bytes:
            return other.desk.issue(self.plane.own, valid_for_s=5.0)

        to = PeerAddress(Peer(worker_id, incarnation), "here", other.addresses)
        return await self.plane.connect(to, issue, deadline_s=2.0)


@dataclass
class Side:
    """One worker."""

    rig: PrefixRig
    source: BlockSource
    target: Target
    plane: Plane
    door: EngineDoor

    def integrity(self) -> None:
        self.door.end_long_step()
        assert self.rig.store is not None
        self.rig.store.cache.check_integrity(
            [block for held in self.rig.table._held.values() for block in held.blocks]
        )


_SMALL = TransferConfig(batch_blocks=2)
_DEVICE_ONLY = PrefixCacheConfig(host_mb=0)


@contextmanager
def pair(
    config: TransferConfig = _SMALL, cached: PrefixCacheConfig = _DEVICE_ONLY
) -> Iterator[tuple[Side, Side]]:
    """`giver` and `taker`, of the same model."""
    with workers("giver", "taker", config=config, cached=cached) as (giver, taker):
        yield giver, taker


@contextmanager
def workers(
    *names: str, config: TransferConfig = _SMALL, cached: PrefixCacheConfig = _DEVICE_ONLY
) -> Iterator[list[Side]]:
    """Of the same model."""
    planes = {name: Plane(Peer(name, 1), "here", [TcpTransport()]) for name in names}
    sides: list[Side] = []
    for plane in planes.values():
        rig = PrefixRig(make_engine(), cached)
        store = rig.store
        assert store is not None
        plane.open()
        door = EngineDoor()
        cache = CacheDoor(door, store.cache)
        records = Records(rig.engine.pools)
        source = BlockSource(cache, store.transfers, records, store.fingerprint)
        for kind, receiver in source.receivers.items():
            plane.desk.serve(kind, receiver)
        dialler = cast(Registry, Dialler(plane, planes))
        target = Target(
            dialler,
            cache,
            store.transfers,
            records,
            store.fingerprint,
            BLOCK_TOKENS,
            config,
            host=store.host,
        )
        sides.append(Side(rig, source, target, plane, door))
    try:
        yield sides
    finally:
        for side in sides:
            side.target.close()
            side.plane.close()
            side.door.close()
            assert side.rig.store is not None
            side.rig.store.close(5.0)
