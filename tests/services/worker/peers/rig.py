"""What tests of workers' cooperation share: dialling without a bus."""

import asyncio
from typing import cast

from services.worker.peers.registry import Registry
from services.worker.peers.transport.base import Peer
from services.worker.peers.transport.link import PeerLink
from services.worker.peers.transport.plane import PeerAddress, Plane
from shared.errors import NoResponder


class Dialler:
    """In place of a `Registry`: gets tickets directly from the others' desks. `away` cannot be dialled."""

    def __init__(self, plane: Plane, others: dict[str, Plane]) -> None:
        self.plane, self.others, self.rates = plane, others, plane.choice.rates
        self.links: list[PeerLink] = []
        self.is_away = False

    async def dial(self, worker_id: str, incarnation: int) -> PeerLink:
        if self.is_away:
            raise NoResponder(f"{worker_id} is not there")
        other = self.others[worker_id]

        async def issue() -> bytes:
            return other.desk.issue(self.plane.own, valid_for_s=5.0)

        to = PeerAddress(Peer(worker_id, incarnation), "here", other.addresses)
        self.links.append(await self.plane.connect(to, issue, deadline_s=2.0))
        return self.links[-1]

    @property
    def registry(self) -> Registry:
        return cast(Registry, self)

    async def close(self) -> None:
        for link in self.links:
            link.close()
        for plane in (self.plane, *self.others.values()):
            await asyncio.to_thread(plane.close)
