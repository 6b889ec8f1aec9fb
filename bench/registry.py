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
    """One line of `python -m bench --list`. `module` is a name below the package `bench`."""

    name: str
    module: str
    description: str

    def load(self) -> BenchModule:
        """Import the module. Raises ImportError if a dependency is not installed."""
        return cast(BenchModule, importlib.import_module(f"bench.{self.module}"))


BENCHES = (
    Bench("audit", "micro.audit", "what checking KV for flipped bits costs"),
    Bench(
        "batch", "live.batch", "chats beside a batch, with and without: p99; all done though processes die"
    ),
    Bench("bulk", "micro.bulk.bench", "GB/s between two workers, by each transport"),
    Bench("distattention", "micro.distattention.bench", "attention over keys that other workers hold"),
    Bench("engine", "live.engine.bench", "our engine, served, against vLLM or llama.cpp"),
    Bench("overload", "live.overload", "three times the load that a stack can serve: goodput, refusals"),
    Bench("overhead", "live.overhead.bench", "what gateway, bus and scheduler add to the engine"),
    Bench("sessions", "live.sessions", "agents and chats of many turns, short of KV, against vLLM"),
    Bench("step", "micro.step", "one decode step of the engine alone"),
    Bench("gpu", "micro.gpu.bench", "how much of a GPU's memory bandwidth decodes use"),
    Bench("experiment", "simulated.experiment.bench", "a YAML grid of policies, predictors, traces, rates"),
    Bench("chaos", "live.chaos", "processes killed and frozen under streams: what do clients notice"),
    Bench("formats", "micro.formats", "what weights of fewer bits cost in perplexity, and in time"),
    Bench("explain", "live.explain", "how much of requests' time is accounted for"),
    Bench("fleet", "simulated.fleet", "one queue for several workers; which worker a prompt goes to"),
    Bench("fleet-scale", "live.fleet_scale", "what the control plane costs with 10 to 1,000 workers"),
    Bench("pie", "live.pie.bench", "KV layers swapped behind the computation, live or simulated"),
    Bench("pie-gpu", "micro.pie_gpu", "Pie's copies beside Llama-2-13B's computation on a GPU"),
    Bench("migrate", "live.migrate.bench", "live migrations while clients read: pauses, gaps, text"),
    Bench("host", "live.host", "what the host does for a token where the model costs nothing"),
    Bench("house", "house.bench", "how hard the code is to enter: what a request passes through"),
    Bench("papers", "papers.bench", "what five papers claim: their figures, ours, a verdict"),
    Bench("placement", "simulated.placement.bench", "GPUs and moves of MELL against its rivals, simulated"),
    Bench("prefix", "live.prefix.bench", "what the prefix cache finds (simulated) and brings (live)"),
    Bench("dgfm", "simulated.dgfm", "what settling cycles of debts brings, simulated or live"),
    Bench("predictor", "micro.predictor", "answer lengths predicted, against the histogram"),
    Bench("lengths", "micro.lengths", "what hidden states tell of the rest of an answer, and cost"),
    Bench("scheduler", "micro.scheduler", "what one planning step costs with a long queue"),
    Bench("serve", "live.serve.bench", "sustained rate on a tight KV: policies of ours and vLLM, live"),
    Bench("sim-check", "live.sim_check.bench", "the simulator's error against a live run on this machine"),
    Bench("sim-ecoserve", "simulated.ecoserve.bench", "EcoServe and kvasir against their rivals, simulated"),
    Bench("settings", "live.settings", "two sets of settings, turn by turn: speed of chats, same answers?"),
    Bench("structured", "live.structured", "answers held to JSON schemas: their cost, and are they valid"),
    Bench(
        "together", "live.together.bench", "what the mechanisms for short memory bring, together and alone"
    ),
    Bench("tenants", "simulated.tenants", "three keys, one floods: what the others notice"),
    Bench("tiers", "micro.tiers", "the longest step while blocks go to the host or come from it"),
)


def names() -> list[str]:
    """Return the names of all benches, in order."""
    return [bench.name for bench in BENCHES]


def find(name: str) -> Bench:
    """Return the bench called `name`. Raises KeyError."""
    return {bench.name: bench for bench in BENCHES}[name]
