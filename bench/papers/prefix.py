"""Claims of prefix caching (papers/002 §V and §VII): templates and chats, replayed and served."""

from argparse import Namespace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from bench.kit.context import Context
from bench.kit.models import TINY_CHAT
from bench.live.prefix import live
from bench.live.prefix.live import TIERS
from bench.live.prefix.workloads import Templates
from bench.papers.claims import Claim, Effort, Figures, Picture, Rule, Study, points
from bench.simulated.prefix import Chain, Conversations, Replayed, Sizes, generate, replay
from services.worker.core.costs import find_cost
from shared.blocks import HASH_BYTES

_SHAPE = Templates()
_BLOCK_TOKENS = 16
_TOKEN_BYTES = 2 * 2 * 32 * 4096
"""KV of a token of Llama-2-7B in 16 bits."""
_HOST_BYTES_S, _DISK_BYTES_S = 12e9, 2e9
"""Copies over PCIe 3.0 and reads of an NVMe disk."""
_LESS_COMPUTE, _LESS_BANDWIDTH = 312 / 71, 2039 / 936
"""An A100 over the paper's RTX 3090."""
_BATCH, _CHAT_ANSWER_TOKENS = 8, 250


def _templates(effort: Effort) -> list[Chain]:
    """Return prompts with one of 128 prefixes each, as block names; bodies are shorter than a block."""
    draw, blocks = Random(effort.seed), _SHAPE.prefix_blocks
    chosen = (draw.randrange(_SHAPE.prefixes) for _ in range(effort.pick(4000, 500)))
    return [tuple((at * blocks + i).to_bytes(HASH_BYTES, "little") for i in range(blocks)) for at in chosen]


def _prefixes(device: int, host: int = 0, disk: int = 0) -> Sizes:
    return Sizes(*(count * _SHAPE.prefix_blocks for count in (device, host, disk)))


def _request_s(found: Replayed, requests: int, output_tokens: int, disk_bytes_s: float = 0.0) -> float:
    """Return a request's mean seconds: blocks computed, its share of a batch's decodes, and blocks copied.
    Prefetching hides copies behind the computation; with `disk_bytes_s` it is off."""
    cost = find_cost("llama2-7b-a100")
    missing, *copied = (
        blocks / requests * _BLOCK_TOKENS for blocks in (found.asked - sum(found.found), *found.found[1:])
    )
    computed_s = cost.step_s([(0, round(missing) + _SHAPE.body_tokens)], 0, 0) * _LESS_COMPUTE
    context = round(found.asked / requests * _BLOCK_TOKENS)
    decode_s = cost.step_s([], _BATCH, _BATCH * context) / _BATCH * _LESS_BANDWIDTH
    busy_s = computed_s + output_tokens * decode_s
    copied_s = _TOKEN_BYTES * (copied[0] / _HOST_BYTES_S + copied[1] / (disk_bytes_s or _DISK_BYTES_S))
    return busy_s + copied_s if disk_bytes_s else max(busy_s, copied_s)


def templates(effort: Effort) -> Figures:
    """Replay text analysis on the worker's own cache, tier by tier and with every eviction order."""
    chains = _templates(effort)
    tiers = {
        "device": _prefixes(_SHAPE.device),
        "host": _prefixes(_SHAPE.device, _SHAPE.host),
        "disk": _prefixes(_SHAPE.device, _SHAPE.host, _SHAPE.disk),
    }
    runs = {name: replay(chains, sizes, "lru", seed=effort.seed) for name, sizes in tiers.items()}
    none = Replayed(runs["disk"].asked, (0, 0, 0))
    count, output = len(chains), _SHAPE.output_tokens
    rates = {name: 1 / _request_s(run, count, output) for name, run in {**runs, "none": none}.items()}
    waited, slow = (1 / _request_s(runs["disk"], count, output, disk) for disk in (_DISK_BYTES_S, 500e6))
    orders = [
        replay(chains, tiers["host"], policy, seed=effort.seed).hit_rate
        for policy in ("lru", "fifo", "random")
    ]
    misses = {name: 1 - run.hit_rate for name, run in runs.items()}
    drawn = points("prefix-rate", {"LRU": rates}) | points("prefix-misses", {"LRU": misses})
    return drawn | {
        "text": rates["disk"] / rates["none"],
        "text_today": rates["disk"] / rates["device"],
        "text_waiting": waited / rates["device"],
        "text_waiting_slow": slow / rates["device"],
        "miss_host": misses["host"] / misses["device"],
        "miss_disk": misses["disk"] / misses["host"],
        "orders": max(orders) / min(orders),
    }


def chats(effort: Effort) -> Figures:
    """Replay chats with the system prompt as the only prefix, as in the paper, and with whole histories."""
    shape = Conversations()
    chains = generate(shape, effort.pick(4000, 400), Random(effort.seed))
    only = [chain[: shape.system_blocks] for chain in chains]
    asked = sum(map(len, chains))
    hits = [(0, 0, 0), *(replay(part, Sizes(5000), "lru").found for part in (only, chains))]
    none_s, system_s, whole_s = (
        _request_s(Replayed(asked, found), len(chains), _CHAT_ANSWER_TOKENS) for found in hits
    )
    return {"chat": none_s / system_s, "chat_today": none_s / whole_s}


def served(effort: Effort) -> Figures:
    """Serve text analysis on whole stacks, with and without the cache, by order of the queue."""
    with TemporaryDirectory() as folder:
        flags = Namespace(model=str(TINY_CHAT), workloads=("text",), tiers=TIERS[-1:])
        context = Context("prefix", effort.quick, effort.seed, Path(folder), flags)
        found = live.run(context).figures
    cell = f"text_vs_none_{TIERS[-1].replace('+', '_')}"
    rates = {order: found[f"{cell}_{order}"] for order in ("fcfs", "fpf", "relaxed_fpf")}
    return points("prefix-orders", {"all tiers": rates}) | {
        "live_text": found["text_throughput_vs_none"],
        "fpf": found[f"{cell}_fpf"] / found[f"{cell}_fcfs"],
        "relaxed_fpf": found[f"{cell}_relaxed_fpf"] / found[f"{cell}_fcfs"],
    }


STUDIES = (
    Study(
        "prefix",
        "prefix-templates",
        "128 prefixes of 400 tokens, room for 8 on the device, 32 on the host, 128 on disk; the worker's own "
        "cache replayed, Llama-2-7B's costs on an RTX 3090",
        templates,
        (
            Claim(
                "text", "throughput of text analysis, of no cache", "abstract", (2, 2), today="device cache"
            ),
            Claim(
                "text_waiting",
                "the same without prefetch, of device cache",
                "§V-G",
                (1, 1),
                Rule.MOST,
                turns=(("a disk of 0.5 GB/s", "text_waiting_slow"),),
            ),
            Claim("miss_host", "misses with a host tier, of device alone", "§VII-C", (1, 1), Rule.MOST),
            Claim("miss_disk", "misses with a disk tier, of no disk", "§VII-C", (1, 1), Rule.MOST),
            Claim(
                "orders", "hits of the best of LRU, FIFO, random, of the worst", "§VII-C", (1, 1), Rule.MOST
            ),
        ),
        pictures=(
            Picture("prefix-rate", "prefix caching, text analysis", "", "requests/s"),
            Picture("prefix-misses", "prefix caching, text analysis", "", "share of blocks computed"),
        ),
    ),
    Study(
        "prefix",
        "prefix-chats",
        "20 system prompts, several turns, answers of 250 tokens; replayed, costs as above",
        chats,
        (
            Claim(
                "chat",
                "chats with the system prompt as prefix, of no cache",
                "§VII-C",
                (1, 1),
                Rule.MOST,
                today="whole histories found",
            ),
        ),
    ),
    Study(
        "prefix",
        "prefix-served",
        "the same templates, Tiny Chat's stack on this machine, all tiers; live",
        served,
        (
            Claim("live_text", "throughput of text analysis, of no cache", "abstract", (2, 2)),
            Claim("fpf", "throughput of FPF, of FCFS", "§V-F", (1, 1), Rule.LEAST),
            Claim("relaxed_fpf", "throughput of relaxed FPF, of FCFS", "§V-F", (1, 1), Rule.LEAST),
        ),
        has_quick=False,
        pictures=(Picture("prefix-orders", "prefix caching, orders", "", "throughput, of no cache"),),
    ),
)
