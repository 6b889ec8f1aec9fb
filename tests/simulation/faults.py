"""Carries out the faults of a schedule in the simulated fleet."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations

from tests.simulation.bus import Noise, Server
from tests.simulation.disk import Trouble
from tests.simulation.fleet import Fleet
from tests.simulation.schedules import Fault
from tests.simulation.skew import from_the_future
from tests.simulation.world import Process

_STUCK_S = 3.0
"""For so long a process hangs before it is replaced."""


def arrange(fleet: Fleet, faults: Sequence[Fault]) -> None:
    """They will happen."""
    for fault in faults:
        fleet.world.after(fault.at_s, partial(_begin, fleet, fault))


def _begin(fleet: Fleet, fault: Fault) -> None:
    fleet.world.note("fault", fault)
    _CARRIED_OUT[fault.kind](fleet, fault)


def _on(act: Callable[[Fleet, Fault, Process], object]) -> Callable[[Fleet, Fault], None]:
    """With its target, if that lives."""

    def carry_out(fleet: Fleet, fault: Fault) -> None:
        process = fleet.present.get(fault.target)
        if process is not None and process.alive:
            act(fleet, fault, process)

    return carry_out


def _kill(fleet: Fleet, fault: Fault, process: Process) -> None:
    process.kill()
    fleet.world.after(min(fault.for_s, 2.0) + 0.1, partial(fleet.start, fault.target))


def _terminate(fleet: Fleet, fault: Fault, process: Process) -> None:
    process.on_death.append(lambda: fleet.world.after(0.2, partial(fleet.start, fault.target)))
    process.terminate()
    fleet.world.after(10.0, process.kill)


def _hang(fleet: Fleet, fault: Fault, process: Process) -> None:
    """All of it stands, or its event loop alone, until it is replaced, or goes on from where it was."""
    if fault.kind == "hang":
        process.freeze(fault.for_s)
    else:
        process.loop.strand.hangs_until_s = fleet.world.now_s + fault.for_s
    if fault.for_s > _STUCK_S:
        fleet.world.after(_STUCK_S, partial(_kill, fleet, fault, process))


def _cut(fleet: Fleet, fault: Fault, process: Process) -> None:
    for connection in fleet.bus.all:
        if connection.process is process:
            connection.cut(fault.for_s)
    fleet.bus.cut_until_s[process.name] = fleet.world.now_s + fault.for_s


def _part(fleet: Fleet, fault: Fault) -> None:
    """Every second process, from all others."""
    for at, name in enumerate(fleet.shape.names):
        process = fleet.present.get(name)
        if at % 2 and process is not None and process.alive:
            _cut(fleet, fault, process)


def _reset(fleet: Fleet, fault: Fault, process: Process) -> None:
    for connection in list(fleet.bus.all):
        if connection.process is process:
            connection.break_off(away_s=fault.for_s / 4)


def _noise(fleet: Fleet, fault: Fault) -> None:
    kind = fleet.world.random.choice(("loss", "twice", "overtaken", "delay", "all"))
    amount = fault.amount
    noise = Noise(
        loss=amount if kind in ("loss", "all") else 0.0,
        twice=amount if kind in ("twice", "all") else 0.0,
        overtaken=amount if kind in ("overtaken", "all") else 0.0,
        delay_s=amount if kind in ("delay", "all") else 0.0,
    )
    fleet.bus.noise = noise

    def end() -> None:
        if fleet.bus.noise is noise:
            fleet.bus.noise = Noise()

    fleet.world.after(fault.for_s, end)


def _slow(fleet: Fleet, fault: Fault, process: Process) -> None:
    process.slowness = 1 + 100 * fault.amount

    def end() -> None:
        process.slowness = 1.0

    fleet.world.after(fault.for_s, end)


def _copies_hang(fleet: Fleet, fault: Fault, process: Process) -> None:
    process.copies_stand_until_s = fleet.world.now_s + fault.for_s


def _slow_all(fleet: Fleet, fault: Fault) -> None:
    for process in list(fleet.present.values()):
        _slow(fleet, fault, process)


def _wall_clock(fleet: Fleet, fault: Fault, process: Process) -> None:
    process.wall_ahead_s += fleet.world.random.choice((-86_400.0, -5.0, 5.0, 86_400.0))


def _leap(fleet: Fleet, fault: Fault, process: Process) -> None:
    """Its monotonic clock, as where a machine has slept."""
    process.clock_ahead_s += fleet.world.random.choice((0.5, 3.0, 30.0))


def _disk(fleet: Fleet, fault: Fault) -> None:
    trouble = {
        "disk full": Trouble(is_full=True),
        "disk corrupt": Trouble(corrupts=fault.amount),
        "disk fails": Trouble(fails=fault.amount),
    }[fault.kind]
    fleet.disks.trouble[fault.target] = trouble

    def end() -> None:
        if fleet.disks.trouble.get(fault.target) is trouble:
            del fleet.disks.trouble[fault.target]

    fleet.world.after(fault.for_s, end)


def _memory_worn(fleet: Fleet, fault: Fault) -> None:
    fleet.worn_memory[fault.target] = 5 * fault.amount
    fleet.world.after(fault.for_s, lambda: fleet.worn_memory.pop(fault.target, None))


def _bus_down(fleet: Fleet, fault: Fault) -> None:
    """All servers."""
    for server in fleet.bus.servers:
        server.restart(min(fault.for_s, 2.0))


def _server(act: Callable[[Fleet, Fault, Server], object]) -> Callable[[Fleet, Fault], None]:
    """With its target, a nats-server."""

    def carry_out(fleet: Fleet, fault: Fault) -> None:
        act(fleet, fault, fleet.bus.home[fault.target])

    return carry_out


def _route_breaks(fleet: Fleet, fault: Fault, server: Server) -> None:
    """To one of the others, mostly both ways."""
    other = fleet.world.random.choice(list(server.routes))
    server.routes[other].cut(fault.for_s, *fleet.world.random.choice(((), (), (server,), (other,))))


def _no_majority(fleet: Fleet, fault: Fault) -> None:
    """No two servers reach each other."""
    for one, other in combinations(fleet.bus.servers, 2):
        one.routes[other].cut(fault.for_s)


def _host_is_lost(fleet: Fleet, fault: Fault, server: Server) -> None:
    """By one or both of the others; it goes on by itself."""
    for other in fleet.world.random.choice((list(server.routes), list(server.routes)[:1])):
        fleet.bus.part(server, other, fault.for_s)


def _skew(fleet: Fleet, fault: Fault) -> None:
    """That one speaks a later version: its messages have fields that nobody knows."""
    newer = fault.target
    fleet.bus.rewrite = lambda sender, data: from_the_future(data) if sender == newer else data


_CARRIED_OUT: dict[str, Callable[[Fleet, Fault], None]] = {
    "kill": _on(_kill),
    "terminate": _on(_terminate),
    "hang": _on(_hang),
    "loop hangs": _on(_hang),
    "freeze": _on(lambda fleet, fault, process: process.freeze(fault.for_s)),
    "cut": _on(_cut),
    "part": _part,
    "reset": _on(_reset),
    "bus down": _bus_down,
    "server dies": _server(lambda fleet, fault, server: server.restart(fault.for_s)),
    "server hangs": _server(lambda fleet, fault, server: server.hang(fault.for_s)),
    "route breaks": _server(_route_breaks),
    "no majority": _no_majority,
    "host is lost": _server(_host_is_lost),
    "noise": _noise,
    "slow": _on(_slow),
    "slow all": _slow_all,
    "copies hang": _on(_copies_hang),
    "wall clock": _on(_wall_clock),
    "leap": _on(_leap),
    "disk full": _disk,
    "disk corrupt": _disk,
    "disk fails": _disk,
    "memory worn": _memory_worn,
    "skew": _skew,
}
