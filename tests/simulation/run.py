"""One schedule, from its seed to a verdict."""

import gc
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.simulation.checks import ANSWERS_WITHIN_S, QUIET_WITHIN_S, Checks, Violation
from tests.simulation.clients import Clients
from tests.simulation.faults import arrange
from tests.simulation.fleet import Fleet
from tests.simulation.schedules import Schedule
from tests.simulation.world import World


@dataclass(frozen=True)
class Verdict:
    """Of one schedule."""

    seed: int
    digest: str
    """Of everything that was said on the bus, and when."""
    events: int
    virtual_s: float
    violation: str = ""


def simulate(schedule: Schedule, trace: Callable[[str], object] | None = None) -> Verdict:
    """The same for the same schedule, wherever it runs."""
    verdict = _simulate(schedule, trace)
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    gc.collect()  # Coroutines and threads that were killed complain of it.
    sys.unraisablehook = hook
    return verdict


def _simulate(schedule: Schedule, trace: Callable[[str], object] | None) -> Verdict:
    world = World(schedule.seed)
    world.trace = trace
    fleet = Fleet(world, schedule.shape)
    violation = ""
    began_s = world.now_s
    with fleet.inhabited():
        fleet.start_all()
        clients = Clients(fleet, list(schedule.questions))
        checks = Checks(fleet, clients)
        arrange(fleet, schedule.faults)
        with _heard(checks):
            try:
                _run(world, clients, checks, schedule.trouble_ends_s)
            except Violation as error:
                violation = str(error)
    world.end()
    return Verdict(schedule.seed, world.digest, world.events, world.now_s - began_s, violation)


def _run(world: World, clients: Clients, checks: Checks, trouble_ends_s: float) -> None:
    """Raises Violation."""

    world.after_event = checks.after_event
    world.run_until(lambda: clients.are_done, trouble_ends_s + ANSWERS_WITHIN_S)
    checks.check_answers()
    checks.check_over()
    world.run_until(checks.is_quiet, trouble_ends_s + QUIET_WITHIN_S)
    checks.check_quiet()


def run_seeds(seeds: list[int]) -> list[Verdict]:
    """In this process, which keeps what each schedule leaves behind; it is not looked through again."""
    verdicts = []
    for seed in seeds:
        verdicts.append(simulate(Schedule.of(seed)))
        gc.freeze()
    return verdicts


@contextmanager
def _heard(checks: Checks) -> Iterator[None]:
    """What services log is heard, and not shown unless somebody has asked for it."""
    logger, handler = logging.getLogger("kvasir"), checks.log_handler()
    level, propagates = logger.level, logger.propagate
    if not logging.getLogger().isEnabledFor(logging.INFO):
        logger.setLevel(logging.ERROR)
        logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates
