"""`python -m bench sim-check`: one live run replayed in the simulator, and how far off that is.

Three runs on one live worker (`vllm` policy, Tiny Chat): the first and the last give the cost model, the
one in between is predicted. Different prompts, seeds and rates. Of the middle run the simulator is given
what any trace has: arrival times, prompt and answer lengths. What the gateway and the bus add to a request
is one constant, also from the other two.
"""

import statistics
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.kit.context import Context
from bench.kit.outcome import Outcome, Table
from bench.kit.stacks import Stack, start_stack
from bench.kit.stats import percentile
from bench.live.chats import LiveRun, chat_bodies, run_load
from services.scheduler.policy.contract import PolicySettings, WorkerShape
from services.worker.core.costs.linear import LinearCost, MeasuredStep, fit_linear
from shared.errors import InternalError
from shared.messages.plans import WorkerStepped
from sim.predictors import NoPredictor
from sim.requests import ServedRecord, SimRequest
from sim.simulation import Setup, Simulation

BLOCK_TOKENS = 16
MAX_STEPS = 8
TOKEN_BUDGET = 512
_LONGEST_GAP_S = 0.02
"""Between two steps of a busy worker; more is idleness."""


@dataclass(frozen=True)
class Latencies:
    """Of one run, live or simulated; seconds."""

    tokens_per_s: float
    normalized_s: float
    ttft_s_mean: float
    ttft_s_p50: float


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--policy", default="vllm", help="[%(default)s]")
    parser.add_argument("--requests", type=int, help="of each run [300, quick: 60]")
    parser.add_argument("--rate", type=float, help="of the run that is predicted, per s [6, quick: 4]")
    parser.add_argument("--kv-blocks", type=int, default=256, help=f"of {BLOCK_TOKENS} tokens [%(default)s]")
    parser.add_argument("--sequences", type=int, default=32, help="in one batch [%(default)s]")
    parser.add_argument("--max-tokens", type=int, default=256, help="of every request [%(default)s]")


def run(context: Context) -> Outcome:
    """Raises InternalError when the stack does not start or answers fail to the last."""
    flags = context.arguments
    count = flags.requests or (60 if context.quick else 300)
    rate = flags.rate or (4.0 if context.quick else 6.0)
    context.say("starting a stack with one worker")
    with start_stack(context.run_dir.resolve() / "stack", _settings(context)) as stack:
        context.say(f"warming up, then {count // 2} requests at {rate / 2:g}/s to learn the costs from")
        _load(stack, 8, 8.0, context.seed + 1000, flags.max_tokens)
        lessons = [_load(stack, count // 2, rate / 2, context.seed + 1, flags.max_tokens)]
        context.say(f"{count} requests at {rate:g}/s to be predicted")
        live = _load(stack, count, rate, context.seed + 2, flags.max_tokens)
        context.say(f"{count // 2} more to learn from: the machine may have changed in between")
        lessons.append(_load(stack, count // 2, rate / 2, context.seed + 3, flags.max_tokens))
    cost = _fit(lessons)
    overhead_s = _overhead_s(lessons, cost, context)
    simulated = _replay(live, cost, context)
    _record(context, live, simulated, overhead_s)
    failures = sum(one.failures for one in (live, *lessons))
    return _outcome(live, simulated, cost, overhead_s, failures)


def _settings(context: Context) -> dict[str, object]:
    flags = context.arguments
    return {
        "worker.threads": 1,
        "worker.prefix_cache.enabled": False,
        "worker.kv_blocks": flags.kv_blocks,
        "worker.block_tokens": BLOCK_TOKENS,
        "scheduler.policy": flags.policy,
        "scheduler.max_batch_sequences": flags.sequences,
        "scheduler.token_budget": TOKEN_BUDGET,
        "scheduler.max_steps": MAX_STEPS,
    }


def _load(stack: Stack, count: int, rate: float, seed: int, max_tokens: int) -> LiveRun:
    run = run_load(stack, chat_bodies(count, seed, max_tokens), rate, seed, max_tokens)
    if run.failures == len(run.answers):
        raise InternalError(f"no request was answered: {run.answers[0].error}")
    return run


def _fit(runs: Sequence[LiveRun]) -> LinearCost:
    """From the step reports; what passes between two steps of a busy worker is added to each."""
    steps = [
        MeasuredStep(event.prefilled_tokens, event.decoded_tokens // done, event.step_s)
        for run in runs
        for _, event, done in _reported(run)
        if event.step_s > 0 and event.prefilled_tokens + event.decoded_tokens
    ]
    gaps_s = [gap_s for run in runs for gap_s in _gaps_s(run)]
    return fit_linear(steps, name="this machine", overhead_s=max(0.0, statistics.median(gaps_s or [0.0])))


def _reported(run: LiveRun) -> Iterator[tuple[float, WorkerStepped, int]]:
    """When each report came, and how many steps it is about: of a plan of several not all are reported. One
    of several that prefills is left out: which of them did is not known."""
    plan_seq, steps_done = 0, 0
    for at_s, event in run.steps:
        if event.plan_seq != plan_seq:
            plan_seq, steps_done = event.plan_seq, 0
        done, steps_done = event.steps_done - steps_done, event.steps_done
        if done == 1 or (done > 1 and not event.prefilled_tokens):
            yield at_s, event, done


def _gaps_s(run: LiveRun) -> list[float]:
    gaps_s = [
        (later_s - earlier_s) / done - later.step_s
        for (earlier_s, earlier, _), (later_s, later, done) in pairwise(_reported(run))
        if later.seq == earlier.seq + 1
    ]
    return [gap_s for gap_s in gaps_s if gap_s < _LONGEST_GAP_S]


def _answered(run: LiveRun) -> list[int]:
    """Indices of the answers that can be compared."""
    return [i for i, one in enumerate(run.answers) if one.ok and one.completion_tokens and one.event_s]


def _replay(run: LiveRun, cost: LinearCost, context: Context) -> list[ServedRecord]:
    """The run's requests through the simulator, in their order."""
    flags = context.arguments
    requests = [
        SimRequest(
            index,
            run.answers[index].sent_s - run.start_s,
            run.answers[index].prompt_tokens,
            run.answers[index].completion_tokens,
            run.max_tokens,
        )
        for index in _answered(run)
    ]
    settings = PolicySettings(
        max_batch_sequences=flags.sequences, token_budget=TOKEN_BUDGET, max_steps=MAX_STEPS
    )
    shape = WorkerShape(BLOCK_TOKENS, flags.kv_blocks)
    setup = Setup(flags.policy, shape, settings, cost, NoPredictor())
    return sorted(Simulation(setup, requests).run().records, key=lambda record: record.request.index)


def _overhead_s(runs: Sequence[LiveRun], cost: LinearCost, context: Context) -> float:
    """What a first token takes beyond the simulated time: gateway, bus, client."""
    return statistics.median(
        run.answers[record.request.index].first_s - (record.first_token_s - record.request.arrival_s)
        for run in runs
        for record in _replay(run, cost, context)
    )


def _live_latencies(run: LiveRun) -> Latencies:
    answers = [run.answers[index] for index in _answered(run)]
    span_s = max(one.ended_s for one in answers) - min(one.sent_s for one in answers)
    return Latencies(
        sum(one.completion_tokens for one in answers) / span_s,
        statistics.fmean((one.ended_s - one.sent_s) / one.completion_tokens for one in answers),
        statistics.fmean(one.first_s for one in answers),
        percentile([one.first_s for one in answers], 50),
    )


def _simulated_latencies(records: Sequence[ServedRecord], overhead_s: float) -> Latencies:
    first_s = [record.first_token_s - record.request.arrival_s + overhead_s for record in records]
    span_s = max(r.end_s for r in records) - min(r.request.arrival_s for r in records) + overhead_s
    return Latencies(
        sum(record.request.output_tokens for record in records) / span_s,
        statistics.fmean((record.jct_s + overhead_s) / record.request.output_tokens for record in records),
        statistics.fmean(first_s),
        percentile(first_s, 50),
    )


def _record(context: Context, run: LiveRun, records: Sequence[ServedRecord], overhead_s: float) -> None:
    for record in records:
        answer = run.answers[record.request.index]
        context.record(
            {
                "arrival_s": record.request.arrival_s,
                "prompt_tokens": record.request.prompt_tokens,
                "output_tokens": record.request.output_tokens,
                "live_ttft_s": answer.first_s,
                "simulated_ttft_s": record.first_token_s - record.request.arrival_s + overhead_s,
                "live_jct_s": answer.ended_s - answer.sent_s,
                "simulated_jct_s": record.jct_s + overhead_s,
            }
        )


def _outcome(
    live: LiveRun, records: Sequence[ServedRecord], cost: LinearCost, overhead_s: float, failures: int
) -> Outcome:
    real, made = _live_latencies(live), _simulated_latencies(records, overhead_s)
    names = {
        "throughput": "tokens_per_s",
        "normalized": "normalized_s",
        "ttft_mean": "ttft_s_mean",
        "ttft_p50": "ttft_s_p50",
    }
    figures = {
        f"{name}_error": getattr(made, field) / getattr(real, field) - 1 for name, field in names.items()
    }
    rows = [(f, getattr(real, f), getattr(made, f), figures[f"{n}_error"]) for n, f in names.items()]
    figures |= {
        "step_fixed_ms": 1e3 * cost.fixed_s,
        "step_prefill_token_ms": 1e3 * cost.prefill_token_s,
        "step_sequence_ms": 1e3 * cost.sequence_s,
        "request_overhead_ms": 1e3 * overhead_s,
    }
    notes = [
        "errors are simulated / live - 1; costs and overhead come from runs before and after",
        "step times do not know contexts; the machine's noise during the predicted run is in the error",
    ]
    table = Table("live and simulated", ("figure", "live", "simulated", "error"), rows)
    return Outcome(figures, failures, [table], notes)
