"""The table of benches. A bench's module is imported only when it is run.

A bench is a module with

    def add_arguments(parser: argparse.ArgumentParser) -> None   # its own flags
    def run(context: Context) -> Outcome                         # context.arguments has the flags

`run` may raise KvasirError: its message is shown and the exit code is 1.
"""

import importlib
from argparse import ArgumentParser
from dataclasses import dataclass
from typing import Protocol, cast

from bench.kit.context import Context
from bench.kit.outcome import Outcome


class BenchModule(Protocol):
    """Interface of a bench's module."""

    def add_arguments(self, parser: ArgumentParser, /) -> None: ...

    def run(self, context: Context, /) -> Outcome: ...


@dataclass(frozen=True)
class Bench:
    """One line of `python -m bench --list`."""

    name: str
    module: str
    description: str

    def load(self) -> BenchModule:
        """Import the module. Raises ImportError if a dependency is not installed."""
        return cast(BenchModule, importlib.import_module(self.module))


BENCHES: tuple[Bench, ...] = (
    Bench("audit", "bench.micro.audit.bench", "flipped bits: are all caught, and what checking costs"),
    Bench("bulk", "bench.micro.bulk.bench", "GB/s between two workers, by each transport"),
    Bench("distattention", "bench.micro.distattention.bench", "attention over keys that other workers hold"),
    Bench("engine", "bench.live.engine.bench", "our engine, served, against vLLM, transformers or llama.cpp"),
    Bench(
        "vllm-variants", "bench.live.engine.variants", "which way of running vLLM is its fastest on one core"
    ),
    Bench(
        "overload", "bench.live.overload", "three times the load that a stack can serve: goodput, refusals"
    ),
    Bench("overhead", "bench.live.overhead.bench", "what gateway, bus and scheduler add to the engine"),
    Bench("step", "bench.micro.step", "one decode step of the engine alone"),
    Bench("gpu", "bench.micro.gpu.bench", "how much of a GPU's memory bandwidth decodes use"),
    Bench(
        "experiment", "bench.simulated.experiment.bench", "a YAML grid of policies, predictors, traces, rates"
    ),
    Bench("chaos", "bench.live.chaos", "processes killed and frozen under streams: what do clients notice"),
    Bench("explain", "bench.live.explain", "how much of requests' time is accounted for"),
    Bench("fleet", "bench.simulated.fleet", "one queue for several workers; which worker a prompt goes to"),
    Bench("pie", "bench.live.pie.bench", "KV layers swapped behind the computation, live or simulated"),
    Bench("pie-gpu", "bench.micro.pie_gpu", "Pie's copies beside Llama-2-13B's computation on a GPU"),
    Bench("migrate", "bench.live.migrate.bench", "live migrations while clients read: pauses, gaps, text"),
    Bench("house", "bench.house.bench", "how hard the code is to enter: what a request passes through"),
    Bench("ladder", "bench.live.ladder.bench", "what each way out of a full memory is worth, live"),
    Bench(
        "placement", "bench.simulated.placement.bench", "GPUs and moves of MELL against its rivals, simulated"
    ),
    Bench(
        "prefix",
        "bench.live.prefix.bench",
        "what the prefix cache finds (simulated) and what it brings (live)",
    ),
    Bench("dgfm", "bench.simulated.dgfm", "what settling cycles of debts brings, simulated or live"),
    Bench("predictor", "bench.micro.predictor", "answer lengths predicted, against the histogram"),
    Bench("lengths", "bench.micro.lengths", "what hidden states tell of the rest of an answer, and cost"),
    Bench("scheduler", "bench.micro.scheduler", "what one planning step costs with a long queue"),
    Bench("serve", "bench.live.serve.bench", "sustained rate on a tight KV: policies of ours and vLLM, live"),
    Bench(
        "sim-check", "bench.live.sim_check.bench", "the simulator's error against a live run on this machine"
    ),
    Bench(
        "sim-ecoserve",
        "bench.simulated.ecoserve.bench",
        "EcoServe and kvasir against their rivals, simulated",
    ),
    Bench(
        "structured", "bench.live.structured", "answers held to JSON schemas: their cost, and are they valid"
    ),
    Bench(
        "together", "bench.live.together.bench", "what the mechanisms for short memory bring together, live"
    ),
    Bench("tenants", "bench.simulated.tenants.bench", "three keys, one floods: what the others notice"),
    Bench("tiers", "bench.micro.tiers", "the longest step while blocks go to the host or come from it"),
    Bench("vllm-client", "bench.live.vllm_client", "vLLM's own load generator against our gateway"),
)


def names() -> list[str]:
    """Return the names of all benches, in order."""
    return [bench.name for bench in BENCHES]


def find(name: str) -> Bench:
    """Return the bench called `name`. Raises KeyError."""
    for bench in BENCHES:
        if bench.name == name:
            return bench
    raise KeyError(name)
