"""The simulator at the size of a large fleet: what a run costs, and what it expects of the fleet.

The policy objects are the live ones: `kvasir`, `prefix_aware`, `histogram`. One core runs it.
"""

import gc
import resource
import time

from bench.kit.context import Context
from bench.kit.datasets import data_folder
from bench.kit.outcome import Outcome, Table
from shared.errors import ConfigError
from sim.case import Case, run_case
from sim.summary import summarize
from sim.workloads import find_source

RATE_PER_S = 2.0
"""Requests per second and worker: about four fifths of what OPT-13B on an A100 sustains."""
_SHOWN = ("requests_per_s", "tokens_per_s", "ttft_s_p50", "ttft_s_p99", "jct_s_p95", "wait_s_p99",
          "kvc_utilization")  # fmt: skip


def simulate(context: Context, size: str) -> Outcome:
    """Run `WORKERSxREQUESTS`. Raises ConfigError for another form."""
    left, cross, right = size.partition("x")
    if not (cross and left.isdecimal() and right.isdecimal() and int(left) and int(right)):
        raise ConfigError(f"--simulate {size}: write WORKERSxREQUESTS, as in 1000x50000", param="simulate")
    workers, requests = int(left), int(right)
    case = Case(
        find_source("sharegpt", data_folder()),
        "kvasir",
        workers=workers,
        requests=requests,
        rate_per_s=RATE_PER_S * workers,
        placement="prefix_aware",
        seed=context.seed,
    )
    context.say(f"{workers} workers, {requests} requests, {RATE_PER_S:g} a second for each worker")
    gc.freeze()  # Only what the run itself allocates is looked at.
    began_s, cpu_s = time.perf_counter(), time.process_time()
    outcome = run_case(case)
    took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    gc.unfreeze()
    found = summarize(outcome)
    name = f"simulate_{workers}x{_short(requests)}"
    figures = {
        f"{name}_min": took_s / 60,
        f"{name}_us_per_request": cpu_s / requests * 1e6,
        f"{name}_speedup": outcome.end_s / took_s,
        f"{name}_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    title = f"{workers} workers, {outcome.end_s:.0f} s of {RATE_PER_S * workers:g} requests/s (simulated)"
    table = Table(title, ("expected", "value"), [(one, found[one]) for one in _SHOWN])
    notes = ["sharegpt lengths, OPT-13B on an A100-80G, policy kvasir, placement prefix_aware"]
    return Outcome(figures, 0, [table], notes, simulated=True)


def _short(count: int) -> str:
    for size, letter in ((1_000_000, "m"), (1000, "k")):
        if count % size == 0:
            return f"{count // size}{letter}"
    return str(count)
