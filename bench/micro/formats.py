"""`python -m bench formats`: what weights and KV of fewer bits cost in perplexity, and in time of a step.

The text is these pages' decisions, which no model was trained on. Each chunk of it is a prompt of its own.
`perplexity_NAME` is the perplexity over that of fp32, minus 1. Of a GGUF file fp32 are the values that its
blocks stand for. Times are CPU time of one thread: the least of several steps. `bandwidth_share_NAME` is the
rate at which a step of one row reads weights, over that at which the same thread sums floats in memory.
"""

import math
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from time import thread_time

import torch

from bench.kit.context import Context
from bench.kit.models import checkpoint
from bench.kit.outcome import Outcome, Table
from bench.kit.provenance import ROOT
from bench.micro.step import decode_rows
from services.worker.engine.contract import Row
from services.worker.engine.engine import TorchEngine
from services.worker.engine.loading import load
from services.worker.engine.native.llama import NativeLlama
from services.worker.engine.native.weights import Arena
from services.worker.engine.spans import Span
from shared.errors import ConfigError
from shared.messages.sequence import Sampling
from shared.tokenizer_files import load_tokenizer

_CHUNK, _BLOCK_TOKENS, _REPEATS = 512, 16, 8
_FORMATS = ("fp32", "auto", "bf16", "int8", "int4", "kv_bf16", "kv_int8")
_KV = {"kv_bf16": torch.bfloat16, "kv_int8": torch.int8}
_BATCHES = (1, 8, 32)
_FLOATS = 1 << 27
"""512 MB, which no cache holds."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--model", default="models/tiny_chat", help="folder or GGUF file [%(default)s]")
    parser.add_argument("--tokens", type=int, default=8192, help="of the text [%(default)s]")


def run(context: Context) -> Outcome:
    """Run the bench. Raises ConfigError for an unloadable model."""
    flags = context.arguments
    torch.set_num_threads(1)
    model = str(checkpoint(flags.model))
    chunks = _chunks(model, 2048 if context.quick else flags.tokens)
    rate = _bytes_per_s()
    losses: dict[str, float] = {}
    figures: dict[str, float] = {}
    rows: list[Sequence[object]] = []
    with context.progress("formats", len(_FORMATS)) as progress:
        for name in _FORMATS:
            engine = _engine(model, name)
            losses[name] = sum(_loss(engine, chunk) for chunk in chunks) / sum(
                len(chunk) - 1 for chunk in chunks
            )
            times_ms = [_least_ms(engine, decode_rows(batch, 100, _GREEDY)) for batch in _BATCHES]
            prompt = [Row(chunks[0], 0, range(_CHUNK // _BLOCK_TOKENS), None)]
            prompt_s = _least_ms(engine, prompt) / 1e3
            more = math.exp(losses[name] - losses["fp32"]) - 1
            figures[f"perplexity_{name}"] = math.exp(losses[name]) if name == "fp32" else more
            for batch, took_ms in zip(_BATCHES, times_ms, strict=True):
                figures[f"step_ms_{name}_b{batch}"] = took_ms
            figures[f"prompt_tok_s_{name}"] = len(chunks[0]) / prompt_s
            share = _weight_bytes(engine) / (times_ms[0] / 1e3) / rate
            figures[f"bandwidth_share_{name}"] = share
            said = f"{100 * more:+.2f} %", *times_ms, len(chunks[0]) / prompt_s, share
            rows.append((name, math.exp(losses[name]), *said))
            progress.advance()
    of_batches = (f"step ms, {batch}" for batch in _BATCHES)
    columns = ("format", "perplexity", "over fp32", *of_batches, "prompt tok/s", "bandwidth, 1")
    notes = [f"{sum(map(len, chunks))} tokens in chunks of {_CHUNK}; int8 and int4: activations of 8 bits"]
    return Outcome(figures, 0, [Table("fewer bits", columns, rows)], notes)


_GREEDY = Sampling(seed=0, max_tokens=1, temperature=0.0)


def _engine(model: str, weights: str) -> TorchEngine:
    loaded = load(model, dtype="float32", device="cpu", weights="fp32" if weights in _KV else weights)
    loaded = replace(loaded, kv_dtype=_KV.get(weights, loaded.kv_dtype))
    return TorchEngine(loaded, kv_blocks=max(_BATCHES) * 8, block_tokens=_BLOCK_TOKENS, release=True)


def _weight_bytes(engine: TorchEngine) -> int:
    """Return the bytes of the native step's weights, without a table of embeddings of its own."""
    if not isinstance(engine._forward, NativeLlama):
        raise ConfigError("the native step does not compute this model: see its log", param="model")
    weights = engine._forward.weights
    left_out = {part.data_ptr() for pair in weights.rotations for part in pair} | {weights.embedding.data}
    return sum(part.nbytes for part in weights.held if part.data_ptr() not in left_out - {weights.head.data})


def _bytes_per_s() -> float:
    memory, took_s = Arena(_FLOATS).take(_FLOATS).fill_(1.0), []
    for _ in range(_REPEATS):
        began_s = thread_time()
        memory.sum()
        took_s.append(thread_time() - began_s)
    return memory.nbytes / min(took_s)


def _chunks(model: str, tokens: int) -> list[list[int]]:
    pages = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
    text = "\n\n".join(page.read_text("utf-8") for page in pages)
    ids = load_tokenizer(model).tokenizer.encode(text, add_special_tokens=False).ids[:tokens]
    return [ids[first : first + _CHUNK] for first in range(0, len(ids) - _CHUNK + 1, _CHUNK)]


@torch.inference_mode()
def _loss(engine: TorchEngine, chunk: list[int]) -> float:
    """Return the summed negative log-likelihood of a chunk's tokens, the first apart."""
    engine.attention.begin([Span(0, len(chunk), range(-(-len(chunk) // _BLOCK_TOKENS)))], 0)
    tokens, places = torch.tensor(chunk), torch.arange(len(chunk))
    logits = engine.forward(tokens, places, places).values
    engine.attention.end()
    return float(torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="sum"))


def _least_ms(engine: TorchEngine, rows: list[Row]) -> float:
    took_s = []
    for _ in range(_REPEATS):
        began_s = thread_time()
        engine.step(rows)
        took_s.append(thread_time() - began_s)
    return min(took_s) * 1e3
