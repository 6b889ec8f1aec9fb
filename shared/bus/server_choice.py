"""Which server of a cluster a link is connected to.

Servers forward nothing for each other. If the link's server loses one that another server still reaches, the
link moves there. It moves back to the first of its servers, the nearest, once that reaches as many.
"""

import asyncio
import random
import ssl
from collections.abc import Awaitable, Callable

from shared.bus.client import FairClient
from shared.config import BusConfig
from shared.server_info import server_info

_LOOKS, _LOOK_S = 8, 0.25
"""How often, and after how long each time, to look for a server that reaches more others."""
_HOME_S = 4.0
"""Mean time between two looks at the first server while connected to another one."""
_NO_HURRY_S = 2.0
"""For its answer, on a machine that may be busy."""


class ServerChoice:
    """Moves one link from server to server. Does nothing if there is only one."""

    def __init__(
        self,
        config: BusConfig,
        encrypted: ssl.SSLContext | None,
        now: Callable[[], tuple[FairClient, str] | None],
        move: Callable[[FairClient, str], Awaitable[None]],
        own: Callable[[Awaitable[None]], asyncio.Task[None]],
    ) -> None:
        """`now` returns the client and the address of its server, or None while disconnected; `move` leaves
        the client for another server; `own` runs a task."""
        self._urls, self._now, self._move, self._own = config.urls, now, move, own
        self._encrypted = encrypted if config.tls_handshake_first else None
        self._looking: asyncio.Task[None] | None = None
        self._returning: asyncio.Task[None] | None = None

    def look_around(self, client: FairClient) -> None:
        """Look for a better server, since this one lost others."""
        if len(self._urls) > 1 and (self._looking is None or self._looking.done()):
            self._looking = self._own(self._look_around(client))

    def head_home(self) -> None:
        """Return to the first server, in a while."""
        now = self._now()
        is_away = len(self._urls) > 1 and now is not None and now[1] != self._urls[0]
        if is_away and (self._returning is None or self._returning.done()):
            self._returning = self._own(self._return_home())

    async def _look_around(self, client: FairClient) -> None:
        for _ in range(_LOOKS):
            await asyncio.sleep(_LOOK_S)
            if (now := self._now()) is None or now[0] is not client:
                return
            others = [url for url in self._urls if url != now[1]]
            reached = await asyncio.gather(*map(self._reached_by, others))
            most, url = max(zip(reached, others, strict=True))
            if most > client.reached:
                return await self._move(client, url)

    async def _return_home(self) -> None:
        home = self._urls[0]
        while (now := self._now()) is None or now[1] != home:
            await asyncio.sleep(random.uniform(0.5, 1.5) * _HOME_S)
            if (now := self._now()) and await self._reached_by(home, _NO_HURRY_S) >= now[0].reached:
                await self._move(now[0], home)

    async def _reached_by(self, url: str, within_s: float = _LOOK_S) -> int:
        """Return the number of addresses that this server tells; 0 if it does not answer."""
        try:
            async with asyncio.timeout(within_s):
                return len((await server_info(url, self._encrypted)).get("connect_urls") or ())
        except (OSError, TimeoutError, ValueError):
            return 0
