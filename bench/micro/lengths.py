"""`bench lengths`: accuracy of predictions from hidden states, and the cost of exporting the states.

The bundled model answers exercises with sampling. Both heads get the states as in production, and predict
before they learn from the answer. The last third is compared with the histogram given the tokens so far.
Kendall's tau is the share of pairs in the right order minus the share in the wrong one.
"""

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from bench.kit.context import Context
from bench.kit.models import TINY_CHAT
from bench.kit.outcome import Outcome, Table
from bench.kit.stats import median_of_ratios
from bench.micro.predictor import tokenizer
from models.train_tiny_chat.templates import template_chat
from services.predictor.core.distribution import HistogramModel
from services.predictor.core.length_model import LengthSample
from services.predictor.core.rest_learner import HEADS, RestLearner
from services.worker.core.sampling import SamplePoint
from services.worker.engine.contract import Row
from services.worker.engine.engine import TorchEngine
from services.worker.engine.loading import load
from shared.messages.sequence import TOKEN_BYTES, Sampling

Floats = npt.NDArray[np.float64]
AT_ONCE, MOST_TOKENS, BLOCK_TOKENS = 64, 300, 16
_PAIRS = 200_000
_LONGEST_PROMPT = 400


@dataclass
class Written:
    """One answer of the bundled model."""

    prompt_tokens: int
    tokens: int = 0
    is_cut: bool = False
    states: list[tuple[int, npt.NDArray[np.float32]]] = field(default_factory=list)
    """(tokens so far, state)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the bench's flags."""
    parser.add_argument("--answers", type=int, help="of the shipped model [3000; quick: 300]")
    parser.add_argument("--every", type=int, default=4, help="tokens between two states [%(default)s]")
    parser.add_argument("--turns", type=int, help="pairs of runs for the cost [8; quick: 2]")


def run(context: Context) -> Outcome:
    """Return `tau_HEAD`, `mae_vs_histogram_HEAD`, `below_pNN_HEAD`, and `cost_every_N` as shares of
    throughput."""
    torch.set_num_threads(1)
    flags = context.arguments
    answers = flags.answers or (300 if context.quick else 3000)
    written: list[Written] = []
    with context.progress("the shipped model answers", answers) as bar:
        for one in write(engine_of(flags.every), prompts(context.random("lengths"), answers)):
            written.append(one)
            bar.advance()
    figures: dict[str, float] = {}
    rows = []
    for kind in sorted(HEADS):
        context.say(f"head {kind}")
        found = judge(kind, written)
        figures |= {f"{name}_{kind}": value for name, value in found.items()}
        rows.append((kind, *(f"{found[name]:.3f}" for name in found)))
    tables = [Table("on tiny_chat's own answers, last third", ("head", *found), rows)]
    for every in (16, 32):
        figures[f"cost_every_{every}"] = cost_of(context, every, flags.turns or (2 if context.quick else 8))
    lengths = [one.tokens for one in written]
    notes = [
        f"{answers} sampled answers, {np.mean(lengths):.0f} tokens in the mean; a state in {flags.every}"
    ]
    return Outcome(figures, 0, tables, notes)


def engine_of(every: int) -> TorchEngine:
    """Return an engine for the bundled model, with KV for `AT_ONCE` answers."""
    blocks = AT_ONCE * -(-(_LONGEST_PROMPT + MOST_TOKENS) // BLOCK_TOKENS)
    model = load(str(TINY_CHAT), dtype="float32", device="cpu")
    return TorchEngine(model, kv_blocks=blocks, block_tokens=BLOCK_TOKENS, states_every=every, release=True)


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Return token ids of exercises."""
    encoder = tokenizer()
    made: list[list[int]] = []
    while len(made) < count:
        ids = encoder.encode(template_chat(rng).prompt(), add_special_tokens=False).ids
        if len(ids) < _LONGEST_PROMPT:
            made.append(ids)
    return made


@dataclass
class _Open:
    """An answer in progress."""

    prompt: list[int]
    sampling: Sampling
    blocks: list[int]
    written: Written
    tokens: list[int]
    computed: int = 0

    def row(self) -> Row:
        point = SamplePoint(self.sampling, 0, len(self.tokens) - len(self.prompt), self.tokens)
        return Row(self.tokens[self.computed :], self.computed, self.blocks, point)


def write(engine: TorchEngine, asked: list[list[int]]) -> Iterator[Written]:
    """Yield answers as they end, `AT_ONCE` at a time."""
    end = 2
    each = engine.kv_blocks // AT_ONCE
    free = [list(range(index * each, (index + 1) * each)) for index in range(AT_ONCE)]
    waiting = list(enumerate(asked))[::-1]
    live: list[_Open] = []
    while live or waiting:
        while free and waiting:
            seed, prompt = waiting.pop()
            sampling = Sampling(seed=seed, max_tokens=MOST_TOKENS, temperature=0.8, end_token_ids=(end,))
            live.append(_Open(prompt, sampling, free.pop(), Written(len(prompt)), list(prompt)))
        going_on = []
        for one, sampled in zip(live, engine.step([one.row() for one in live]), strict=True):
            assert sampled is not None, "the shipped model's logits are finite"
            one.computed = len(one.tokens)
            one.tokens.append(sampled.token)
            count = len(one.tokens) - len(one.prompt)
            if sampled.token == end or count >= MOST_TOKENS:
                one.written.tokens, one.written.is_cut = count, sampled.token != end
                free.append(one.blocks)
                yield one.written
                continue
            if sampled.state is not None:
                state = np.frombuffer(sampled.state, np.float16).astype(np.float32)
                one.written.states.append((count, state))
            going_on.append(one)
        live = going_on


def judge(kind: str, written: list[Written]) -> dict[str, float]:
    """Compare one head with the histogram on the last third of the answers, without truncated ones."""
    width = next(len(state) for one in written for _, state in one.states)
    learner, base = RestLearner(kind, width), HistogramModel()
    rows: list[tuple[float, ...]] = []
    first = 2 * len(written) // 3
    for number, one in enumerate(written):
        key, blank = (str(number), 0), bytes(one.prompt_tokens * TOKEN_BYTES)
        for count, state in one.states:
            [told] = learner.observe([key], [(one.prompt_tokens, count, MOST_TOKENS)], state[None])
            if number >= first and not one.is_cut:
                rival = base.predict(blank, max_tokens=MOST_TOKENS, generated_tokens=count)
                quantiles = (told.p50_tokens, told.p80_tokens, told.p90_tokens, told.p95_tokens)
                rows.append((count, one.tokens, *quantiles, rival.p50_tokens))
        learner.finish(key, one.tokens, censored=one.is_cut)
        base.observe(LengthSample(blank, one.tokens, one.is_cut))
    found: Floats = np.array(rows)
    had, length, median = found[:, 0], found[:, 1], found[:, 6]
    begun = found[had <= 1]
    return {
        "tau": kendall(found[:, 2] - had, length - had),
        "tau_histogram": kendall(median - had, length - had),
        "tau_first": kendall(begun[:, 2], begun[:, 1]),
        "tau_first_histogram": kendall(begun[:, 6], begun[:, 1]),
        "mae": float(np.abs(found[:, 2] - length).mean()),
        "mae_vs_histogram": float(np.abs(found[:, 2] - length).mean() / np.abs(median - length).mean()),
        **{
            f"below_p{share}": float((length <= found[:, column]).mean())
            for share, column in ((50, 2), (80, 3), (90, 4), (95, 5))
        },
    }


def kendall(told: Floats, true: Floats) -> float:
    """Return Kendall's tau over random pairs with different true values; ties in the prediction count 0."""
    random_ = np.random.default_rng(0)
    first, second = random_.integers(len(told), size=(2, _PAIRS))
    differ = true[first] != true[second]
    agree = np.sign(told[first] - told[second]) * np.sign(true[first] - true[second])
    return float(agree[differ].mean()) if differ.any() else 0.0


def cost_of(context: Context, every: int, turns: int) -> float:
    """Return the relative cost of exporting states, with batches of `AT_ONCE` and sides in turns."""
    context.say(f"throughput with a state every {every} tokens")
    asked = prompts(random.Random(5), AT_ONCE)
    engines = {every: engine_of(every), 0: engine_of(0)}
    took: dict[int, list[float]] = {every: [], 0: []}
    for turn in range(turns + 1):
        for side in (every, 0) if turn % 2 else (0, every):
            spent_s = _decode_s(engines[side], asked)
            if turn:  # The first turn is a warm-up.
                took[side].append(spent_s)
    return median_of_ratios(took[every], took[0]) - 1


def _decode_s(engine: TorchEngine, asked: list[list[int]], steps: int = 64) -> float:
    """Return the CPU time of `steps` decode steps of the whole batch."""
    each = engine.kv_blocks // AT_ONCE
    live = [
        _Open(
            prompt,
            Sampling(seed=seed, max_tokens=MOST_TOKENS, temperature=0.0),
            list(range(seed * each, (seed + 1) * each)),
            Written(len(prompt)),
            list(prompt),
        )
        for seed, prompt in enumerate(asked)
    ]
    began_s = time.process_time()
    for _ in range(steps):
        for one, sampled in zip(live, engine.step([one.row() for one in live]), strict=True):
            assert sampled is not None
            one.computed = len(one.tokens)
            one.tokens.append(sampled.token)
    return time.process_time() - began_s
