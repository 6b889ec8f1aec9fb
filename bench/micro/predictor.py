"""`bench predictor`: accuracy of length predictions, against the median by prompt length.

The bundled regressor is trained on the first part of a workload and tested on the rest; it also chooses
epochs and corrections within the first part.
"""

import argparse
import csv
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from bench.kit.context import Context
from bench.kit.models import TINY_CHAT
from bench.kit.outcome import Outcome, Table
from models.train_tiny_chat.chat import END, data_folder
from models.train_tiny_chat.templates import template_chat
from services.predictor.core.length_model import LengthQuery, LengthSample
from services.predictor.core.report import LengthReport, evaluate
from services.predictor.models.regressor import Ensemble, RegressorModel, Trained
from services.predictor.models.training import TrainingPlan, train
from services.predictor.samples import load_tokenizer, read_samples
from shared.errors import ConfigError
from shared.messages.sequence import TOKEN_BYTES, pack_tokens

_PROMPTS = Path("alpaca/alpaca_52002.jsonl")
_LENGTHS = Path("alpaca/alpaca_vicuna7b_response_lengths_20k.csv")


@dataclass(frozen=True)
class Workload:
    """A workload with training and test samples."""

    name: str
    train: Sequence[LengthSample]
    test: Sequence[LengthSample]


def tokenizer() -> Tokenizer:
    """Return the bundled model's tokenizer."""
    return load_tokenizer(TINY_CHAT)


def has_alpaca() -> bool:
    return (data_folder() / _PROMPTS).exists() and (data_folder() / _LENGTHS).exists()


def alpaca(train: int = 10_000, test: int = 10_000) -> Workload:
    """Return Vicuna-7B's lengths at T=0 in file order; lengths at its limit of 512 are kept."""
    prompts: dict[str, str] = {}
    with (data_folder() / _PROMPTS).open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            text = row["instruction"]
            prompts[str(row["id"])] = f"{text}\n{row['input']}" if row.get("input") else text
    with (data_folder() / _LENGTHS).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    chosen = [*rows[:train], *rows[10_000 : 10_000 + test]]
    encoded = tokenizer().encode_batch([prompts[row["id"]] for row in chosen], add_special_tokens=False)
    samples = [
        LengthSample(pack_tokens(one.ids), max(1, int(float(row["L_t0.0"]))), censored=False)
        for one, row in zip(encoded, chosen, strict=True)
    ]
    cut = len(rows[:train])
    return Workload("vicuna", samples[:cut], samples[cut:])


def from_file(path: Path, train_share: float = 0.5) -> Workload:
    """Read JSONL as `services/predictor/samples.py` does; the first half is for training."""
    samples = read_samples(path, tokenizer())
    cut = int(len(samples) * train_share)
    if cut < 100:
        raise ConfigError(f"{path.name} has {len(samples)} rows; at least 200 are needed", param="trace")
    return Workload(path.stem, samples[:cut], samples[cut:])


def templates(rng: random.Random, train: int, test: int) -> Workload:
    """Return new exercises of the bundled model's training; the request determines the answer's length."""
    encoder = tokenizer()
    samples = []
    for _ in range(train + test):
        chat = template_chat(rng)
        prompt, answer = chat.prompt(), chat.turns[-1][1].strip() + END
        length = len(encoder.encode(answer, add_special_tokens=False).ids)
        samples.append(LengthSample(_packed(encoder, prompt), length, censored=False))
    return Workload("templates", samples[:train], samples[train:])


def tiny_chat(
    rng: random.Random, train: int, test: int, *, max_tokens: int = 200, batch: int = 48
) -> Iterator[tuple[int, Workload | None]]:
    """Yield (answers done, None) while the bundled model answers exercises greedily, then the workload."""
    from models.train_tiny_chat.generation import Generator

    generator = Generator(TINY_CHAT)
    encoder = tokenizer()
    prompts = [template_chat(rng).prompt() for _ in range(train + test)]
    samples: list[LengthSample] = []
    for start in range(0, len(prompts), batch):
        for answer in generator.answer(prompts[start : start + batch], 0.0, max_tokens):
            prompt = _packed(encoder, answer.prompt)
            samples.append(LengthSample(prompt, max(1, answer.length_tokens()), not answer.ended))
        yield len(samples), None
    yield len(samples), Workload("tiny_chat", samples[:train], samples[train:])


def _packed(encoder: Tokenizer, text: str) -> bytes:
    return pack_tokens(encoder.encode(text, add_special_tokens=False).ids)


Counts = npt.NDArray[np.int64]
BUCKETS = 32
BATCH = 32
_REPEATS = 5
_MAX_TOKENS = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the bench's flags."""
    parser.add_argument("--trace", type=Path, metavar="FILE", help="JSONL with prompt and length or response")
    parser.add_argument("--members", type=int, default=5, help="networks in the ensemble [%(default)s]")
    parser.add_argument(
        "--tiny-chat", type=int, metavar="N", help="answers of the shipped model to write [600; quick: 0]"
    )


def run(context: Context) -> Outcome:
    """Run the bench. Figures of the bundled model's answers begin with `tiny_chat_`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(context)
    finally:
        torch.set_num_threads(threads)


def _run(context: Context) -> Outcome:
    workload = _main_workload(context)
    plan = TrainingPlan(members=2 if context.quick else context.arguments.members, seed=context.seed)
    figures, tables = _measure(context, workload, plan, prefix="")
    answers = context.arguments.tiny_chat
    if answers is None:
        answers = 0 if context.quick else 600
    if answers >= 200:
        own = _tiny_chat(context, answers)
        more, own_tables = _measure(context, own, plan, prefix="tiny_chat_")
        figures |= more
        tables += own_tables
    notes = [
        f"trained on {len(workload.train)} and tested on {len(workload.test)} prompts of '{workload.name}'",
        "the time of a batch is the least of five calls, the median over batches",
    ]
    if workload.name == "vicuna":
        notes.append("noise floor: the same model at T=0.5 and 0.7 differs by 45.6 tokens; 69 % within 50")
    return Outcome(figures, failures=0, tables=tables, notes=notes)


def _main_workload(context: Context) -> Workload:
    if context.arguments.trace is not None:
        return from_file(context.arguments.trace)
    if has_alpaca():
        return alpaca(2500, 1000) if context.quick else alpaca()
    context.say("no Alpaca data here (python -m bench data): exercises made by templates instead")
    sizes = (2500, 1000) if context.quick else (10_000, 10_000)
    return templates(context.random("templates"), *sizes)


def _tiny_chat(context: Context, answers: int) -> Workload:
    test = answers // 3
    with context.progress("the shipped model answers", answers) as bar:
        done = 0
        for count, made in tiny_chat(context.random("tiny_chat"), answers - test, test):
            bar.advance(count - done)
            done = count
            if made is not None:
                return made
    raise AssertionError("the last item is the workload")


def _measure(
    context: Context, workload: Workload, plan: TrainingPlan, *, prefix: str
) -> tuple[dict[str, float], list[Table]]:
    model = RegressorModel(Trained(_trained(context, workload, plan), 1, {}))
    report = evaluate(model, workload.test)
    assert report is not None, "every workload has whole answers"
    rival = histogram_mae(workload.train, workload.test)
    figures = {
        "mae": report.mae_tokens,
        "histogram_mae": rival,
        "mae_vs_histogram": report.mae_tokens / rival,
        "within_50": report.within_50_share,
        "within_100": report.within_100_share,
        "under_share": report.under_share,
        "over_tokens": report.over_tokens,
        "predict_ms_p50_b32": batch_ms(model, workload.test),
    }
    _record(context, model, workload)
    return {prefix + name: value for name, value in figures.items()}, [_calibration(workload, report)]


def _trained(context: Context, workload: Workload, plan: TrainingPlan) -> Ensemble:
    total = plan.members * plan.epochs_for(len(workload.train))
    with context.progress(f"training on {workload.name}", total) as bar:
        return train(
            workload.train,
            plan,
            progress=lambda done, of, mae: bar.advance(1, now=f"(MAE {mae:.1f} on a fold)"),
        )


def histogram_mae(train: Sequence[LengthSample], test: Sequence[LengthSample]) -> float:
    """Return the MAE in tokens of the median in each of 32 quantile buckets of the prompt length."""
    prompts, lengths = _sizes(train)
    edges = np.quantile(prompts, np.linspace(0, 1, BUCKETS + 1)[1:-1])
    buckets = np.searchsorted(edges, prompts)
    medians = np.full(BUCKETS, np.median(lengths))
    for bucket in range(BUCKETS):
        if (buckets == bucket).any():
            medians[bucket] = np.median(lengths[buckets == bucket])
    prompts, lengths = _sizes([sample for sample in test if not sample.censored])
    return float(np.abs(lengths - medians[np.searchsorted(edges, prompts)]).mean())


def _sizes(samples: Sequence[LengthSample]) -> tuple[Counts, Counts]:
    """Return the tokens of prompts and of answers."""
    prompts = np.array([len(sample.prompt) // TOKEN_BYTES for sample in samples])
    return prompts, np.array([sample.output_tokens for sample in samples])


def batch_ms(model: RegressorModel, samples: Sequence[LengthSample]) -> float:
    """Return the wall time of one call for 32 prompts: the median over batches of the least of some calls."""
    times_ms = []
    for start in range(0, min(len(samples), 40 * BATCH), BATCH):
        queries = [LengthQuery(sample.prompt, _MAX_TOKENS) for sample in samples[start : start + BATCH]]
        least_s = float("inf")
        for _ in range(_REPEATS):
            begin_s = time.perf_counter()
            model.predict_batch(queries)
            least_s = min(least_s, time.perf_counter() - begin_s)
        times_ms.append(least_s * 1000)
    return float(np.median(times_ms))


def _record(context: Context, model: RegressorModel, workload: Workload) -> None:
    """Record the predictions, also as a trace for the simulator's `learned`."""
    told = model.predict_batch([LengthQuery(sample.prompt, 1 << 20) for sample in workload.test])
    with (context.run_dir / f"{workload.name}.csv").open("w", newline="") as file:
        trace = csv.writer(file)
        trace.writerow(("prompt_tokens", "output_tokens", "predicted_tokens"))
        for sample, one in zip(workload.test, told, strict=True):
            row = {"length": sample.output_tokens, "p50": one.p50_tokens, "p95": one.p95_tokens}
            context.record({"workload": workload.name, **row})
            trace.writerow((len(sample.prompt) // TOKEN_BYTES, sample.output_tokens, one.rl_tokens))


def _calibration(workload: Workload, report: LengthReport) -> Table:
    rows = [
        ("50 %", report.below_p50_share),
        ("80 %", report.below_p80_share),
        ("90 %", report.below_p90_share),
        ("95 %", report.below_p95_share),
    ]
    return Table(f"{workload.name}: answers at or below each quantile", ("quantile", "share"), rows)
