"""`python -m tests.simulation`: many schedules, or one again with all that happens in it."""

import argparse
import gc
import logging
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.simulation.run import Verdict, run_seeds, simulate
from tests.simulation.schedules import Schedule

_AT_ONCE = 10
"""Schedules that a process is given at a time."""
_MOST_GROUPS = 8
"""Of them, for each process of a pool, until another pool takes its place: each leaves some 3 MB behind."""


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="tests.simulation", description=__doc__)
    parser.add_argument("--schedules", type=int, default=100, help="how many, from --first on")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="one schedule, with what happens in it")
    parser.add_argument("--logs", action="store_true", help="with --seed: what the services log, too")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--stop", action="store_true", help="at the first one that finds something")
    parser.add_argument("--digests", action="store_true", help="what two runs have to agree in")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return _one(arguments.seed, arguments.logs)
    return _many(arguments)


def _one(seed: int, with_logs: bool) -> int:
    schedule = Schedule.of(seed)
    print(schedule.shape)
    for question in schedule.questions:
        print(question)
    for fault in schedule.faults:
        print(fault)
    if with_logs:
        logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s", stream=sys.stdout)
    verdict = simulate(schedule, print)
    print(verdict)
    return int(bool(verdict.violation))


def _many(arguments: argparse.Namespace) -> int:
    began_s = time.monotonic()
    done = events = found = 0
    virtual_s = 0.0
    for verdict in _verdicts(arguments.first, arguments.schedules, arguments.processes):
        done, events, virtual_s = done + 1, events + verdict.events, virtual_s + verdict.virtual_s
        if arguments.digests:
            print(f"{verdict.seed} {verdict.digest} {verdict.events}")
        if verdict.violation:
            found += 1
            print(f"seed {verdict.seed}: {verdict.violation}", flush=True)
            if arguments.stop:
                break
    took_s = time.monotonic() - began_s
    print(
        f"{done} schedules, {found} found something; {done / took_s:.1f} schedules/s, "
        f"{events / done:.0f} events and {virtual_s / done:.1f} virtual s each"
    )
    return int(bool(found))


def _verdicts(first: int, count: int, processes: int) -> Iterator[Verdict]:
    """In order. A pool's processes end together: those of `max_tasks_per_child` end one by one, and in Python
    3.11 nobody takes the place of the last one (gh-115634), so that the rest is waited for without end."""
    seeds = range(first, first + count)
    groups = [list(seeds[at : at + _AT_ONCE]) for at in range(0, count, _AT_ONCE)]
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.simulation.run"])
    for at in range(0, len(groups), processes * _MOST_GROUPS):
        with ProcessPoolExecutor(processes, context, initializer=gc.freeze) as pool:
            try:
                for verdicts in pool.map(run_seeds, groups[at : at + processes * _MOST_GROUPS]):
                    yield from verdicts
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    sys.exit(main())
