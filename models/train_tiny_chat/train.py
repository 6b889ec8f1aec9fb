"""Trains the small chat model within a time budget and exports it.

`python -m models.train_tiny_chat.train --minutes 75 --out models/tiny_chat`. Learning rate, row length and
the share of chats follow the fraction of the budget that is used, so a slow machine gives a worse model, not
a broken one.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from models.train_tiny_chat.chat import data_folder
from models.train_tiny_chat.corpus import Corpus, build_corpus
from models.train_tiny_chat.export import export_model
from models.train_tiny_chat.model import Shape, TinyLlama
from models.train_tiny_chat.packing import RowPacker, encode_books, encode_chat
from models.train_tiny_chat.tokenizer import save_tokenizer, train_tokenizer

BATCH_TOKENS = 4096
MUON_LR, ADAM_LR = 6e-3, 3e-3
WARMUP, DECAY_FROM = 0.02, 0.45
CHECKPOINT_EVERY_S, LOG_EVERY_STEPS = 300.0, 20


@dataclass(frozen=True)
class Stage:
    """What is trained on at one moment: tokens in a row, share of chat rows, loss on answers only or all."""

    row_tokens: int
    chat_share: float
    answers_only: bool


def stage_at(used: float) -> Stage:
    """Books and chats first, then mostly chats, last long rows; `used` is the fraction of the budget, 0 to
    1.
    """
    if used < 0.25:
        return Stage(512, 0.5, answers_only=False)
    if used < 0.6:
        return Stage(512, 0.8, answers_only=False)
    if used < 0.8:
        return Stage(512, 0.95, answers_only=True)
    return Stage(2048, 0.95, answers_only=True)


def learning_rate_factor(used: float) -> float:
    """Linear warm-up, a plateau, then a linear decay to zero at the end of the budget."""
    if used < WARMUP:
        return (used + 0.002) / (WARMUP + 0.002)
    return min(1.0, max(0.0, (1 - used) / (1 - DECAY_FROM)))


class Trainer:
    """Model, optimizers and data of one run; `elapsed_s` counts training only and survives a resume."""

    def __init__(self, tokenizer: Tokenizer, train: Corpus, held: Corpus, seed: int) -> None:
        self.model = TinyLlama(Shape(), seed)
        matrices = [p for n, p in self.model.named_parameters() if p.dim() == 2 and "embed" not in n]
        others = [p for n, p in self.model.named_parameters() if p.dim() != 2 or "embed" in n]
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (
                torch.optim.Muon(
                    matrices, lr=MUON_LR, weight_decay=0.05, ns_steps=4, adjust_lr_fn="match_rms_adamw"
                ),
                MUON_LR,
            ),
            (torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.97), weight_decay=0.0), ADAM_LR),
        ]
        self.step, self.elapsed_s, self.tokens = 0, 0.0, 0
        packers = []
        for corpus in (train, held):
            chats = [encoded for chat in corpus.chats if (encoded := encode_chat(chat, tokenizer))]
            packers.append(RowPacker(encode_books(corpus.books, tokenizer, random.Random(seed)), chats, seed))
        self.data, held_data = packers
        self.held = {
            "books": held_data.batch(24, 512, 0.0, answers_only=False),
            "chat": held_data.batch(24, 512, 1.0, answers_only=False),
            "answers": held_data.batch(24, 512, 1.0, answers_only=True),
        }

    def train_step(self, used: float) -> float:
        """One optimizer step; returns the mean loss in nats per target token."""
        stage = stage_at(used)
        inputs, targets = self.data.batch(
            BATCH_TOKENS // stage.row_tokens, stage.row_tokens, stage.chat_share, stage.answers_only
        )
        count = int((targets != -100).sum())
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.model(inputs, targets) / max(1, count)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, peak in self.optimizers:
            optimizer.param_groups[0]["lr"] = peak * learning_rate_factor(used)
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.tokens += inputs.numel()
        return float(loss.detach())

    @torch.no_grad()
    def held_out_loss(self) -> dict[str, float]:
        """Mean loss in nats per token on held-out books, on chats, and on the answers alone."""
        losses = {}
        for name, (inputs, targets) in self.held.items():
            with torch.autocast("cpu", torch.bfloat16):
                total = sum(
                    float(self.model(inputs[i : i + 8], targets[i : i + 8])) for i in range(0, len(inputs), 8)
                )
            losses[name] = total / int((targets != -100).sum())
        return losses

    def save(self, path: Path) -> None:
        """Writes everything a resume needs; the old checkpoint is replaced in one move."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.optimizers],
            "step": self.step,
            "elapsed_s": self.elapsed_s,
            "tokens": self.tokens,
        }
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)

    def load(self, path: Path) -> None:
        """Continues from a checkpoint written by `save`; the data go on from another place."""
        state = torch.load(path)
        self.model.load_state_dict(state["model"])
        for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.elapsed_s, self.tokens = state["step"], state["elapsed_s"], state["tokens"]
        self.data.restart(self.step)


def run(trainer: Trainer, budget_s: float, checkpoints: Path) -> None:
    """Trains until the budget is used, logging and saving on the way."""
    before, last = trainer.elapsed_s, time.monotonic()
    saved_at = last
    losses: list[float] = []
    while trainer.elapsed_s < budget_s:
        losses.append(trainer.train_step(trainer.elapsed_s / budget_s))
        now = time.monotonic()
        trainer.elapsed_s += now - last
        last = now
        if math.isnan(losses[-1]):
            raise FloatingPointError("the loss is not a number")
        if trainer.step % LOG_EVERY_STEPS == 0:
            mean = sum(losses[-LOG_EVERY_STEPS:]) / len(losses[-LOG_EVERY_STEPS:])
            rate = len(losses) * BATCH_TOKENS / (trainer.elapsed_s - before)
            print(
                f"step {trainer.step} {trainer.elapsed_s:.0f} s loss {mean:.3f} {rate:.0f} tokens/s",
                flush=True,
            )
        if now - saved_at > CHECKPOINT_EVERY_S or trainer.elapsed_s >= budget_s:
            trainer.save(checkpoints / "tiny_chat.pt")
            print("held out", {k: round(v, 4) for k, v in trainer.held_out_loss().items()}, flush=True)
            saved_at = last = time.monotonic()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=75.0, help="training time, without building the corpus"
    )
    parser.add_argument("--out", type=Path, default=Path("models/tiny_chat"))
    parser.add_argument(
        "--checkpoints", type=Path, default=Path("runs/tiny_chat"), help="folder for tiny_chat.pt"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the checkpoint and its tokenizer"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    train, held = build_corpus(data_folder(), args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    args.checkpoints.mkdir(parents=True, exist_ok=True)
    if args.resume:
        tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    else:
        texts = [p for book in train.books for p in book[::2]] + [t for c in train.chats for _, t in c.turns]
        tokenizer = train_tokenizer(texts, Shape().vocab_size)
        save_tokenizer(tokenizer, args.out, Shape().max_position_embeddings)
    trainer = Trainer(tokenizer, train, held, args.seed)
    if args.resume:
        trainer.load(args.checkpoints / "tiny_chat.pt")
    run(trainer, args.minutes * 60, args.checkpoints)
    export_model(trainer.model, tokenizer, args.out)


if __name__ == "__main__":
    main()
