"""Two workers' engines, caches and bulk planes in one process: real KV, real links, no bus."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

from services.worker.core.settings import PrefixCacheConfig, TransferConfig
from services.worker.core.steps import StepCore
from services.worker.door import Door
from services.worker.kv.store import KvStore
from services.worker.peers.migration.source import BlockSource
from services.worker.peers.migration.target import Target
from services.worker.peers.transport.base import Peer
from services.worker.peers.transport.plane import Plane
from services.worker.peers.transport.tcp import TcpTransport
from shared.messages.moves import PullBlocks
from shared.messages.sequence import pack_tokens
from tests.services.worker.peers.rig import Dialler
from tests.services.worker.prefix_rig import PrefixRig, make_engine

LONGEST_S = 10.0
PROMPT = [3, 5, 7, 9, 11, 2, 4, 6, 8, 10, 12, 14, 16, 18, 1, 2, 3, 4, 5]


def order(
    tokens: list[int] = PROMPT, *, incarnation: int = 1, source: str = "giver", is_shadow: bool = False
) -> PullBlocks:
    packed = pack_tokens(tokens)
    return PullBlocks(source=source, source_incarnation=incarnation, tokens=packed, is_shadow=is_shadow)


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


@dataclass
class Side:
    """One worker."""

    rig: PrefixRig
    store: KvStore
    source: BlockSource
    target: Target
    plane: Plane
    door: EngineDoor

    def integrity(self) -> None:
        self.door.end_long_step()
        held = [block for held in self.rig.table._held.values() for block in held.blocks]
        self.store.cache.check_integrity(held)


_SMALL = TransferConfig(batch_blocks=2)
_CACHED = PrefixCacheConfig()


@contextmanager
def workers(
    *names: str, config: TransferConfig = _SMALL, cached: PrefixCacheConfig = _CACHED, host_blocks: int = 0
) -> Iterator[list[Side]]:
    """Workers of the same model; by default `giver` and `taker`. Checks them at the end."""
    planes = {name: Plane(Peer(name, 1), "here", [TcpTransport()]) for name in names or ("giver", "taker")}
    sides: list[Side] = []
    for plane in planes.values():
        rig = PrefixRig(make_engine(), cached, host_blocks=host_blocks)
        store, door, engine = rig.store, EngineDoor(), rig.engine
        assert store is not None
        plane.open()
        source = BlockSource(door, store, engine.records())
        plane.desk.serve(source.receivers)
        target = Target(Dialler(plane, planes).registry, door, store, engine, config)
        sides.append(Side(rig, store, source, target, plane, door))
    try:
        yield sides
        for side in sides:
            side.integrity()
    finally:
        for side in sides:
            side.target.close()
            side.plane.close()
            side.door.close()
            side.store.close(5.0)
