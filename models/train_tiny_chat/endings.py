"""Last stage of the training: teaches the model to end where its own greedy answers would start to loop.

A small model decoded greedily falls into loops that no text ever showed it. So it answers training prompts
itself; an answer that repeats itself is cut at the end of the sentence that came a second time, and the model
is trained to write the end token there, next to ordinary chats that keep everything else in place. The idea
is DAgger's (Ross et al., 2011): labels for states that the model itself visits. Its price is that
open answers and continuations become short; the model card has the numbers and a control.

`python -m models.train_tiny_chat.endings --checkpoint runs/tiny_chat/tiny_chat.pt --out models/tiny_chat`
"""

from __future__ import annotations

import argparse
import os
import random
import re
from pathlib import Path

import torch
from tokenizers import Tokenizer

from models.train_tiny_chat.chat import END, Chat, data_folder
from models.train_tiny_chat.corpus import build_corpus
from models.train_tiny_chat.export import export_model
from models.train_tiny_chat.generation import Answer, Generator
from models.train_tiny_chat.packing import EncodedChat, RowPacker
from models.train_tiny_chat.tokenizer import token_id
from models.train_tiny_chat.train import Trainer

ROW_TOKENS = 2048
TRIED_TOKENS = 224  # a loop shows well before the longest answer
REPEAT_TOKENS = 12
PEAK_FACTOR = 0.06  # of the learning rates of the main training
CORRECTION_WEIGHT = 0.3
LOOPING_KINDS = (
    "open",
    "open_detailed",
    "open_brief",
    "continue",
    "continue_long",
    "reading",
    "reading_long",
    "maths",
)


def loop_start(tokens: list[int]) -> int | None:
    """Index where a run of REPEAT_TOKENS tokens occurs for the second time, or None."""
    seen: dict[tuple[int, ...], int] = {}
    for at in range(len(tokens) - REPEAT_TOKENS + 1):
        run = tuple(tokens[at : at + REPEAT_TOKENS])
        if run in seen:
            return at
        seen[run] = at
    return None


def correction(answer: Answer, tokenizer: Tokenizer) -> EncodedChat | None:
    """The prompt, an answer up to its first repetition, that included, and the end, the only part to learn.

    None where nothing repeats or the row would be too long.
    """
    at = loop_start(answer.tokens)
    if at is None:
        return None
    seen = len(tokenizer.decode(answer.tokens[: at + REPEAT_TOKENS - 1]))
    text = tokenizer.decode(answer.tokens[: at + 4 * REPEAT_TOKENS])
    ends = [m.end() for m in re.finditer(r"[.!?][\"']?(?=\s|$)", text) if m.end() >= seen]
    closing = [token_id(tokenizer, END)]
    if not ends:
        closing = [token_id(tokenizer, "."), *closing]
    kept = tokenizer.encode(
        text[: ends[0]] if ends else text[:seen].rstrip(" ,;:-"), add_special_tokens=False
    ).ids
    prompt = tokenizer.encode(answer.prompt, add_special_tokens=False).ids
    tokens = [*prompt, *kept, *closing]
    if not kept or len(tokens) > ROW_TOKENS:
        return None
    return EncodedChat(tokens, [index >= len(prompt) + len(kept) for index in range(len(tokens))])


def draw_prompts(chats: list[Chat], count: int, rng: random.Random) -> list[str]:
    """Training prompts, three quarters of them of the kinds whose answers loop; no stories, whose sentences
    may come back.
    """
    looping = [c.prompt() for c in chats if c.kind in LOOPING_KINDS and len(c.prompt()) < 7000]
    other = [c.prompt() for c in chats if c.kind not in LOOPING_KINDS and "story" not in c.kind]
    return rng.sample(looping, count * 3 // 4) + rng.sample(other, count // 4)


def train_round(trainer: Trainer, packer: RowPacker, steps: int, factor: float) -> None:
    """`steps` optimizer steps, each on two rows of ordinary chats and one longer row of corrections."""
    for _ in range(steps):
        total = torch.zeros(())
        for source, weight, rows in ((trainer.data, 1.0, 2), (packer, CORRECTION_WEIGHT, 1)):
            inputs, targets = source.batch(rows, ROW_TOKENS // rows, 1.0, answers_only=True)
            with torch.autocast("cpu", torch.bfloat16):
                total = total + weight * trainer.model(inputs, targets) / max(1, int((targets != -100).sum()))
        total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        for optimizer, peak in trainer.optimizers:
            optimizer.param_groups[0]["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("models/tiny_chat"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=160, help="prompts answered in a round")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps in a round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    train, held = build_corpus(data_folder(), args.seed)
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    trainer = Trainer(tokenizer, train, held, args.seed + 1)
    trainer.load(args.checkpoint)
    rng = random.Random(args.seed)
    corrections: list[EncodedChat] = []
    for turn in range(args.rounds):
        export_model(trainer.model, tokenizer, args.out)
        prompts = draw_prompts(train.chats, args.prompts, rng)
        answers = Generator(args.out).answer(prompts, 0.0, TRIED_TOKENS)
        fresh = [fixed for a in answers if (fixed := correction(a, tokenizer))]
        corrections += fresh
        print(f"round {turn}: {len(fresh)} of {len(answers)} greedy answers repeat themselves", flush=True)
        if not corrections:
            break
        packer = RowPacker([token_id(tokenizer, END)], corrections, args.seed + turn)
        train_round(trainer, packer, args.steps, PEAK_FACTOR * (1 - turn / args.rounds))
        print("held out", {k: round(v, 4) for k, v in trainer.held_out_loss().items()}, flush=True)
    trainer.save(args.checkpoint.with_name("tiny_chat_final.pt"))
    export_model(trainer.model, tokenizer, args.out)


if __name__ == "__main__":
    main()
