"""All services of a stack: their real `run`, each in a process that can die and be started again."""

import hashlib
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

from services.gateway import service as gateway
from services.gateway.config import GatewayConfig
from services.gateway.sessions import Sessions
from services.ledger import service as ledger
from services.ledger.config import LedgerConfig
from services.placement import service as placement
from services.placement.config import PlacementConfig
from services.predictor import service as predictor
from services.predictor.config import PredictorConfig
from services.scheduler import service as scheduler
from services.scheduler.config import SchedulerConfig
from services.scheduler.leader_term import Term
from services.scheduler.service import SchedulerService
from services.worker import neighbourhood
from services.worker import service as worker
from services.worker.config import WorkerConfig
from services.worker.kv import store
from services.worker.kv.core.prefix_cache import PrefixCache
from services.worker.kv.tiers.host import PeerTier
from services.worker.peers.keeping.loans import Keeper
from services.worker.peers.migration import service as migration
from services.worker.peers.migration import target
from services.worker.peers.migration.source import BlockSource
from services.worker.peers.migration.target import DeviceShelf
from services.worker.service import Worker
from shared.errors import UnavailableError
from tests.simulation import http
from tests.simulation.bulk import Sockets
from tests.simulation.bus import Bus
from tests.simulation.disk import Disks
from tests.simulation.patches import inhabited
from tests.simulation.threads import strand
from tests.simulation.world import Process, World

KEY = "sk-simulation"
MODEL = "models/tiny_chat"


@dataclass(frozen=True)
class Shape:
    """What a stack is made of. `settings` by service."""

    gateways: int = 1
    schedulers: int = 1
    workers: int = 2
    servers: int = 1
    """Of NATS, each on a host of its own among which the processes are divided."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return (
            *(f"scheduler-{number}" for number in range(self.schedulers)),
            "predictor-0",
            "placement-0",
            "ledger-0",
            *(f"worker-{number}" for number in range(self.workers)),
            *(f"gateway-{number}" for number in range(self.gateways)),
        )


Run = Callable[[Any], Coroutine[Any, Any, None]]
_SERVICES: dict[str, tuple[Any, Run]] = {
    "gateway": (GatewayConfig, gateway.run),
    "scheduler": (SchedulerConfig, scheduler.run),
    "predictor": (PredictorConfig, predictor.run),
    "placement": (PlacementConfig, placement.run),
    "ledger": (LedgerConfig, ledger.run),
    "worker": (WorkerConfig, worker.run),
}
_ALWAYS: dict[str, dict[str, Any]] = {
    "gateway": {"api_key_sha256": (hashlib.sha256(KEY.encode()).hexdigest(),), "model": MODEL},
    "scheduler": {"tick_s": 0.04, "shadow_from_s": 0.001},
    "predictor": {"learn": False, "rest_head": "none"},
    "worker": {"engine": "simulated", "model": MODEL, "bulk": {"transports": ("tcp",)}, "kv_blocks": 40},
}


class Loan:
    """A prefix cache, and which of its blocks were taken from it and not brought back."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self.blocks: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def allocate(self, count: int) -> list[int]:
        taken = self._cache.allocate(count)
        self.blocks += taken
        return taken

    def hold(self, names: Any) -> list[int]:
        taken = self._cache.hold(names)
        self.blocks += taken
        return taken

    def release(self, blocks: Any) -> None:
        for block in blocks:
            self.blocks.remove(block)
        self._cache.release(blocks)


class _Records:
    """Records that are watched, or worn."""

    def __init__(self, fleet: "Fleet", records: Any) -> None:
        self._fleet, self._records = fleet, records

    def __getattr__(self, name: str) -> Any:
        return getattr(self._records, name)


class _Arriving(_Records):
    """Of the device, written to by what moves between workers: into blocks that were taken for it."""

    def write(self, rows: Any, blocks: Any) -> None:
        process = strand().process
        taken = {block for loan in self._fleet.loans.get(process, ()) for block in loan.blocks}
        if not taken.issuperset(blocks):
            self._fleet.unforeseen.append(f"{process.name}: a copy writes into blocks that were given back")
        self._records.write(rows, blocks)


class SentBlocks(PeerTier):
    """A worker's copies in other workers' host memory, and which bytes were sent to which slot."""

    def __init__(self, fleet: "Fleet", *args: Any) -> None:
        super().__init__(*args)
        self._fleet = fleet
        self.sent: dict[int, bytes] = {}
        """By slot; not those that are on their way, or were changed on it."""

    def write(self, node: Any, row: Any, sum_: int) -> bool:
        self.sent.pop(node.place, None)
        bytes_sent = self._fleet.bytes_of[node.name] = bytes(row)  # Intact; its slot may be reused meanwhile.
        is_there = super().write(node, row, sum_)
        if is_there and bytes(row) == bytes_sent:
            self.sent[node.place] = bytes_sent
        return is_there

    def read(self, place: int, name: Any, row: Any) -> bool:
        is_there = super().read(place, name, row)
        if is_there and bytes(row) != self._fleet.bytes_of.get(name):
            me = strand().process.name
            self._fleet.unforeseen.append(f"{me} takes a slot of a peer's for a block that is not in it")
        return is_there


class _Keeping(_Records):
    """Of lent host memory, some of which come back with other bits."""

    def read(self, blocks: Any, rows: Any) -> None:
        self._records.read(blocks, rows)
        share, chance = self._fleet.worn_memory.get(strand().process.name, 0.0), self._fleet.world.random
        for row in rows if share else ():
            if chance.random() < share:
                row[chance.randrange(len(row))] ^= 1 << chance.randrange(8)


class Fleet:
    """The stack of one world. Who dies is started again a while later, as a supervisor does."""

    def __init__(self, world: World, shape: Shape) -> None:
        self.world, self.shape = world, shape
        self.bus = Bus(world, shape.servers)
        self.sockets = Sockets(world)
        self.disks = Disks(world)
        self.present: dict[str, Process] = {}
        self.workers: dict[Process, Worker] = {}
        self.sessions: dict[Process, Sessions] = {}
        self.terms: list[tuple[Process, Term]] = []
        """In the order in which they began."""
        self.schedulers: dict[Process, SchedulerService] = {}
        self.on_worker: Callable[[Process, Worker], object] = lambda process, worker: None
        self.loans: dict[Process, list[Loan]] = {}
        """Of workers' prefix caches, to what moves between workers."""
        self.keepers: dict[Process, Any] = {}
        """Records of what they lend of their host memory."""
        self.worn_memory: dict[str, float] = {}
        """By worker: which share of what it keeps for others' caches comes back with other bits."""
        self.bytes_of: dict[bytes, bytes] = {}
        """By name, of each block that was sent to a peer."""
        self.unforeseen: list[str] = []
        """Ends of processes that nobody wanted, and blocks that are somebody else's."""
        self._configs = {name: self._config(name) for name in shape.names}

    @contextmanager
    def inhabited(self) -> Iterator[None]:
        """The services run in this world meanwhile."""
        http.apps.clear()
        with inhabited(self.world, self.sockets, self.disks), self._watched():
            yield

    def start_all(self) -> None:
        for name in self.shape.names:
            self.world.after(self.world.random.uniform(0, 0.3), partial(self.start, name))

    def start(self, name: str) -> None:
        """If it does not run."""
        running = self.present.get(name)
        if running is not None and running.alive:
            return
        config, run = self._configs[name]
        self.world.note("start", name)
        process = Process(self.world, name, lambda: run(config))
        self.present[name] = process

        def on_death() -> None:
            if process.ended is None or process.ended == "cancelled":
                return
            self.world.note("ended", name, repr(process.ended))
            self.world.after(0.5, partial(self.start, name))
            if not isinstance(process.ended, UnavailableError):  # As without a bus when it starts.
                self.unforeseen.append(f"{name} ended: {process.ended!r}")

        process.on_death.append(on_death)

    def alive(self, service: str) -> list[Process]:
        """Its processes, in the order of their names."""
        found = (process for name, process in sorted(self.present.items()) if name.startswith(service))
        return [process for process in found if process.alive]

    def _config(self, name: str) -> tuple[Any, Run]:
        service = name.split("-")[0]
        config_type, run = _SERVICES[service]
        number, servers = self.shape.names.index(name), self.bus.servers
        at = number % len(servers)
        self.bus.home[name] = servers[at]
        url = ",".join(each.url for each in (*servers[at:], *servers[:at]))
        bus = {"user": name, "password": "secret", "url": url}
        given = {**_ALWAYS.get(service, {}), **self.shape.settings.get(service, {})}
        return config_type(instance=name, bus=bus, **given), run

    def _add_worker(self, process: Process, made: Worker) -> None:
        self.workers[process] = made
        self.on_worker(process, made)

    def _on_loan(self, store: Any) -> Any:
        """The store with a cache that keeps account of what is taken from it."""
        loan = Loan(store.cache)
        self.loans.setdefault(strand().process, []).append(loan)
        return replace(store, cache=loan)

    def _block_source(self, door: Any, store: Any, *rest: Any) -> BlockSource:
        return BlockSource(door, self._on_loan(store), *rest)

    def _device_shelf(self, door: Any, store: Any, batch_blocks: int, records: Any) -> DeviceShelf:
        arriving: Any = _Arriving(self, records)
        return DeviceShelf(door, self._on_loan(store), batch_blocks, arriving)

    def _keeper(self, records: Any, grants: Any) -> Keeper:
        self.keepers[strand().process] = records
        return Keeper(_Keeping(self, records), grants)  # type: ignore[arg-type]

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Who makes what is remembered, for the checks."""

        def watch(made: Any, remember: Callable[[Process, Any], object]) -> Any:
            def make(*args: Any, **options: Any) -> Any:
                one = made(*args, **options)
                remember(strand().process, one)
                return one

            return make

        with (
            patch.object(worker, "Worker", watch(Worker, self._add_worker)),
            patch.object(gateway, "Sessions", watch(Sessions, self.sessions.__setitem__)),
            patch.object(migration, "BlockSource", self._block_source),
            patch.object(target, "DeviceShelf", self._device_shelf),
            patch.object(neighbourhood, "Keeper", self._keeper),
            patch.object(store, "PeerTier", partial(SentBlocks, self)),
            patch.object(scheduler, "SchedulerService", watch(SchedulerService, self.schedulers.__setitem__)),
            patch.object(scheduler, "Term", watch(Term, lambda at, term: self.terms.append((at, term)))),
        ):
            yield
