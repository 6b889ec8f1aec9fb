"""`python -m bench sessions`: agents and chats of many turns, with KV for a quarter of what is open.

Sessions share system prompts, send the results of tools between turns, and pause. Some end early. Both sides
have the same KV and all cores. Answers have a fixed length, and each turn repeats the side's own earlier
answers. Several vLLM servers are behind a round robin; ours are workers of one stack.
"""

import asyncio
import random
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import uvloop

from bench.kit.context import Context
from bench.kit.load import Answer, Target, complete, first_error
from bench.kit.models import plain_folder
from bench.kit.outcome import Outcome, Table
from bench.kit.peers import FASTEST, VLLM_BLOCK_TOKENS, VLLM_VARIANTS, start_vllm
from bench.kit.processes import available_cores
from bench.kit.stacks import start_all, start_stack
from bench.kit.stats import median_of_ratios, percentile, with_interval
from models.train_tiny_chat.stories import story_chat
from services.stack import models
from shared.errors import ConfigError, InternalError

_PATH, _BLOCK_TOKENS = "/v1/chat/completions", 16
_CHARS_PER_TOKEN = 4.2
_SYSTEM_TOKENS = (300, 600, 900)
_AGENT_SHARE, _ABANDONED_SHARE = 0.6, 0.15
_LONGEST_PAUSE_S, _DEADLINE_S = 6.0, 240.0
_DISK: Mapping[str, object] = {"worker.prefix_cache.disk_mb": 2048}
_NO_HOST: Mapping[str, object] = {"worker.host_memory.cache_share": 0}
SIDES: Mapping[str, tuple[float, Mapping[str, object]]] = {
    "kvasir": (1.0, {}),
    "device": (1.0, _NO_HOST),
    "ample": (5.0, {}),
    "as_stored": (1.0, {"worker.weights": "auto"}),
    "disk": (1.0, _DISK),
    "restarted": (1.0, _DISK),
}
"""Our sides: multiple of the KV, and settings beside fp32 weights. `device` has no tier on the host, `ample`
memory for everything open, and `as_stored` the weights as the model file has them, our default. The last two
have a disk tier, and count the second half of every session: `restarted` on a new stack."""
_HALVED = ("disk", "restarted")
_OF_AMPLE = ("kvasir", "device")
_FIGURES: Mapping[str, Callable[["Found"], float]] = {
    "tok_s": lambda one: one.tok_s,
    "ttft_p50": lambda one: one.first_p50_s,
    "ttft_p99": lambda one: one.first_p99_s,
}


@dataclass(frozen=True)
class Turn:
    """A message, the length of its answer, and the pause after it."""

    text: str
    answer_tokens: int
    pause_s: float


@dataclass(frozen=True)
class Session:
    """One conversation."""

    system: str
    turns: tuple[Turn, ...]


class Talk:
    """A session as far as it went."""

    def __init__(self, session: Session) -> None:
        self.turns = iter(session.turns)
        self.left = self.length = len(session.turns)
        self.messages = [{"role": "system", "content": session.system}]
        self.known_tokens = 0
        """Tokens that its last turn computed."""


@dataclass(frozen=True)
class Found:
    """Result of a side with all sessions of one seed."""

    tok_s: float
    """Prompt and answer tokens of served requests per second."""
    first_p50_s: float
    first_p99_s: float
    computed: float
    """Share of prompt tokens that the prefix cache did not have."""
    again: float
    """Share of prompt tokens computed again: an earlier turn of the session had computed them."""
    failed: int


@dataclass(frozen=True)
class Taken:
    """A turn that was sent."""

    answer: Answer
    known_tokens: int
    """Tokens of the prompt that the turn before had computed."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--peer", choices=("vllm", "none"), default="vllm", help="[%(default)s]")
    parser.add_argument("--sides", nargs="+", choices=SIDES, help="of ours [all; --quick kvasir]")
    parser.add_argument("--servers", nargs="+", type=int, default=[1, 2], help="of each side [%(default)s]")
    parser.add_argument("--seeds", type=int, help="[3; --quick 1]")
    parser.add_argument("--sessions", type=int, help="for each server [14; --quick 3]")
    parser.add_argument("--open", type=int, default=6, help="at once, for each server [%(default)s]")
    parser.add_argument("--kv-tokens", type=int, default=4096, help="of each server [%(default)s]")
    parser.add_argument("--model", help="a folder or GGUF file [SmolLM2-135M-Instruct]")
    parser.add_argument("--vllm", choices=VLLM_VARIANTS, default=FASTEST, help="[%(default)s]")
    parser.add_argument("--vllm-dtype", choices=("float32", "bfloat16"), default="float32", help="[float32]")


def run(context: Context) -> Outcome:
    """Run the bench. Raises ConfigError without the model or the peer, InternalError if requests fail."""
    flags = context.arguments
    model = Path(flags.model or (models.default() or "").partition("=")[2])
    if not model.is_file() and not (model / "config.json").is_file():
        raise ConfigError(f"no model: run `./kvasir models pull {models.DEFAULT}` first", param="model")
    peer = flags.peer if not context.quick else "none"
    sides = flags.sides or (["kvasir"] if context.quick else list(SIDES))
    seeds = flags.seeds or (1 if context.quick else 3)
    found: dict[tuple[int, str], list[Found]] = {}
    for servers in flags.servers[: 1 if context.quick else None]:
        for seed in range(context.seed, context.seed + seeds):
            count = (flags.sessions or (3 if context.quick else 14)) * servers
            sessions = list(drawn(random.Random(f"sessions/{seed}"), count, flags.kv_tokens))
            names = [*(["vllm"] if peer == "vllm" else []), *sides]
            for name in names[:: -1 if seed % 2 else 1]:
                one = _measured(context, name, servers, model, sessions, seed)
                found.setdefault((servers, name), []).append(one)
                context.record({"servers": servers, "seed": seed, "side": name, **asdict(one)}, "sides.jsonl")
                context.say(f"{servers} x {name}, seed {seed}: {one.tok_s:.0f} tokens/s")
    return outcome(found)


def drawn(dice: random.Random, count: int, most_tokens: int) -> Iterator[Session]:
    """Yield sessions whose context stays below `most_tokens`."""
    systems = [_text(dice, tokens) for tokens in _SYSTEM_TOKENS]
    for _ in range(count):
        system, is_agent = dice.choice(systems), dice.random() < _AGENT_SHARE
        turns, left = list[Turn](), most_tokens - len(system) / _CHARS_PER_TOKEN - 400
        for at in range(dice.randint(6, 12)):
            tool = is_agent and at > 0
            said, answer = dice.randint(60, 250) if tool else dice.randint(20, 80), dice.randint(24, 72)
            pause_s = min(_LONGEST_PAUSE_S, dice.expovariate(2.0 if is_agent else 0.5))
            left -= 1.2 * (said + answer)
            if left < 0:
                break
            turns.append(Turn(_text(dice, said), answer, pause_s))
        if dice.random() < _ABANDONED_SHARE:
            turns = turns[: dice.randint(1, max(1, len(turns)))]
        yield Session(system, tuple(turns))


def _text(dice: random.Random, tokens: int) -> str:
    """Return about so many tokens of stories."""
    chars, text = round(tokens * _CHARS_PER_TOKEN), ""
    while len(text) < chars:
        text += story_chat(dice).turns[-1][1] + " "
    return text[:chars]


def _measured(
    context: Context, name: str, servers: int, model: Path, sessions: Sequence[Session], seed: int
) -> Found:
    flags, folder = context.arguments, context.run_dir / f"{servers}-{name}-{seed}"
    talks, halves = [Talk(session) for session in sessions], (0.5, 1.0) if name in _HALVED else (1.0,)
    folder.mkdir(parents=True)
    with ExitStack() as running:
        for half in halves:
            if half == halves[0] or name == "restarted":
                running.close()
                targets = _started(running, context, name, servers, model, folder / f"{half:g}", folder)
                for target in targets:  # warm it up
                    (warm,) = drawn(random.Random(f"sessions/{seed}/warm"), 1, flags.kv_tokens)
                    uvloop.run(_served([target], [Talk(replace(warm, turns=warm.turns[:2]))], 1))
            taken, elapsed_s = uvloop.run(_served(targets, talks, flags.open * servers, half))
    for one in taken:
        told = {"side": name, "servers": servers, "seed": seed, "known_tokens": one.known_tokens}
        context.record(told | _told(one.answer))
    return found_of(name, taken, elapsed_s)


def _started(
    running: ExitStack, context: Context, name: str, servers: int, model: Path, folder: Path, disk: Path
) -> list[Target]:
    """Start a side's servers."""
    flags, threads = context.arguments, max(1, len(available_cores()) // servers)
    if name == "vllm":
        for at in range(servers):
            (folder / str(at)).mkdir(parents=True)
        starts = [
            partial(
                start_vllm,
                folder / str(at),
                plain_folder(model),
                VLLM_VARIANTS[flags.vllm],
                engine_core=at * threads,
                threads=threads,
                caches=True,
                dtype=flags.vllm_dtype,
                context_tokens=flags.kv_tokens,
                max_sequences=64,
                kv_blocks=flags.kv_tokens // VLLM_BLOCK_TOKENS + 1,  # vLLM keeps one empty
            )
            for at in range(servers)
        ]
        targets = [server.target for server in start_all(starts, running)]
    else:
        times, settings = SIDES[name]
        ours = {
            "worker.weights": "fp32",
            "worker.threads": threads,
            "worker.kv_blocks": round(times * flags.kv_tokens) // _BLOCK_TOKENS,
            **settings,
            **({"worker.prefix_cache.disk_path": disk} if name in _HALVED else {}),
        }
        targets = [running.enter_context(start_stack(folder, ours, model=model, workers=servers)).target]
    return [replace(target, path=_PATH) for target in targets]


def found_of(name: str, taken: Sequence[Taken], elapsed_s: float) -> Found:
    """Return the result of a side. Raises InternalError if it served nothing."""
    served = [one for one in taken if one.answer.ok and one.answer.event_s]
    if not served:
        raise InternalError(f"{name} served nothing: {first_error([one.answer for one in taken])}")
    prompts = sum(one.answer.prompt_tokens for one in served)
    first_s = [one.answer.first_s for one in served]
    return Found(
        tok_s=(prompts + sum(one.answer.completion_tokens for one in served)) / elapsed_s,
        first_p50_s=percentile(first_s, 50),
        first_p99_s=percentile(first_s, 99),
        computed=1 - sum(one.answer.cached_tokens for one in served) / prompts,
        again=sum(max(0, one.known_tokens - one.answer.cached_tokens) for one in served) / prompts,
        failed=len(taken) - len(served),
    )


def _told(answer: Answer) -> dict[str, Any]:
    first_s = answer.first_s if answer.event_s else None
    kept = ("prompt_tokens", "cached_tokens", "completion_tokens", "error")
    return {
        "first_s": first_s,
        "took_s": answer.ended_s - answer.sent_s,
        **{k: getattr(answer, k) for k in kept},
    }


async def _served(
    targets: Sequence[Target], talks: Sequence[Talk], at_once: int, share: float = 1.0
) -> tuple[list[Taken], float]:
    """Serve the talks up to a share of their turns; return these turns and the seconds that they took."""
    gate, servers, taken = asyncio.Semaphore(at_once), cycle(targets), list[Taken]()
    began_s = time.perf_counter()

    async def hold(talk: Talk) -> None:
        async with gate:
            while talk.left > talk.length * (1 - share):
                talk.left, turn = talk.left - 1, next(talk.turns)
                talk.messages.append({"role": "user", "content": turn.text})
                body = {"messages": talk.messages, "max_tokens": turn.answer_tokens, "temperature": 0}
                answer = await complete(next(servers), body | {"ignore_eos": True}, _DEADLINE_S)
                taken.append(Taken(answer, talk.known_tokens))
                if not answer.ok:
                    talk.left = 0
                    return
                talk.known_tokens = answer.prompt_tokens + answer.completion_tokens
                talk.messages.append({"role": "assistant", "content": answer.text})
                await asyncio.sleep(turn.pause_s)

    await asyncio.gather(*map(hold, talks))
    return taken, time.perf_counter() - began_s


def outcome(found: Mapping[tuple[int, str], Sequence[Found]]) -> Outcome:
    """Return ratios within a seed: the median, its interval over seeds, and the worst seed."""
    figures, rows = dict[str, float](), list[tuple[Any, ...]]()
    for (servers, name), many in found.items():
        rows += [(f"{servers} x {name}", seed, *asdict(one).values()) for seed, one in enumerate(many)]
        theirs, ample = (found.get((servers, other), ()) for other in ("vllm", "ample"))
        if name not in ("vllm", *_HALVED) and theirs:
            for figure, value in _FIGURES.items():
                figures |= _ratio(f"{figure}_vs_vllm_{name}_{servers}", many, theirs, value)
        if name in _OF_AMPLE and ample:
            figures |= _ratio(f"of_ample_{name}_{servers}", many, ample, _FIGURES["tok_s"])
        undisturbed = found.get((servers, "disk"), ())
        if name == "restarted" and undisturbed:
            figures |= _ratio(f"after_restart_{servers}", many, undisturbed, _FIGURES["tok_s"])
    columns = ("side", "seed", "tokens/s", "first token p50, s", "p99, s", "computed", "again", "failed")
    failures = sum(one.failed for many in found.values() for one in many)
    notes = [
        "tokens/s: prompts and answers of served requests; computed: share of prompt tokens not cached",
        "again: share of prompt tokens that an earlier turn of the session had computed",
        "FIGURE_vs_vllm_SIDE_SERVERS: median ratio within a seed; _low and _high: 95 % interval over seeds",
    ]
    return Outcome(figures, failures, [Table("sessions", columns, rows)], notes)


def _ratio(
    name: str, ours: Sequence[Found], theirs: Sequence[Found], value: Callable[[Found], float]
) -> dict[str, float]:
    pair = [value(one) for one in ours], [value(one) for one in theirs]
    worst = (max if name.startswith("ttft") else min)(a / b for a, b in zip(*pair, strict=True))
    return with_interval(name, *pair, median_of_ratios) | {f"{name}_worst": worst}
