"""`python -m bench explain`: time accounted for by `services explain`, and whether it names a planted cause.

A mixed run of 200 requests uses three workers with little memory that migrate and lend; one is killed.
"""

import json
import signal
import socket
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench.kit.context import Context
from bench.kit.load import Answer, full_answer, run_batch
from bench.kit.models import TINY_CHAT, drawn_tokens, vocabulary
from bench.kit.outcome import Outcome, Table
from bench.kit.stacks import Stack, start_stack
from bench.live import recorder_cost

REQUESTS = 200
_DEADLINE_S = 240.0
_SILENCE_S = 30.0
MIXED: Mapping[str, object] = {
    "worker.kv_blocks": 48,
    "worker.threads": 1,
    "placement.policy": "mell_eager",
    "worker.lending.borrow": True,
    "worker.lending.max_lent_fraction": 0.5,
    "worker.pie.enabled": False,
}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, help=f"of the mixed run [{REQUESTS}; --quick 40]")
    parser.add_argument("--only", choices=("mixed", *PLANTED, "recorder"), help="this part alone")
    parser.add_argument("--turns", type=int, help="of the recorder's comparison [10; --quick 2]")


def run(context: Context) -> Outcome:
    only = context.arguments.only
    figures: dict[str, float] = {}
    rows: list[Sequence[object]] = []
    failures = 0
    if only in (None, "mixed"):
        figures, failures = mixed(context, context.arguments.requests or (40 if context.quick else REQUESTS))
    for name, (plant, wanted) in PLANTED.items():
        if only not in (None, name):
            continue
        account = plant(context)
        named = account["causes"][0]
        is_right = named["cause"] in wanted
        rows.append((name, named["cause"], f"{named['share']:.0%}", named["note"][:60], is_right))
        context.record({"planted": name, **account}, "planted.jsonl")
    if rows:
        figures["planted_found"] = sum(bool(row[-1]) for row in rows) / len(rows)
    if only in (None, "recorder"):
        turns = context.arguments.turns or (2 if context.quick else 10)
        figures |= recorder_cost.compare(context, turns, requests=8 if context.quick else 48)
    tables = [Table("Planted causes", ("planted", "named first", "share", "note", "right"), rows)]
    return Outcome(figures, failures, tables=tables if rows else [])


def mixed(context: Context, count: int) -> tuple[dict[str, float], int]:
    """Return the figures of a run in which a worker is killed, and the number of failed answers."""
    dice, ids = context.random("mixed"), vocabulary(TINY_CHAT)
    shared = [drawn_tokens(dice, ids, 96) for _ in range(4)]
    bodies = [
        full_answer(
            [*dice.choice(shared), *drawn_tokens(dice, ids, dice.choice((8, 40, 160, 600)))],
            dice.choice((8, 40, 120)),
        )
        for _ in range(count)
    ]
    with start_stack(context.run_dir / "mixed", MIXED, workers=3) as stack:
        answers: list[Answer] = []
        timer = threading.Timer(3.0, lambda: stack.process("worker-2").send_signal(signal.SIGKILL))
        timer.start()
        for first in range(0, count, 50):
            answers += run_batch(stack.target, bodies[first : first + 50], _DEADLINE_S)
        timer.join()
        for error in {answer.error for answer in answers if answer.error}:
            context.record({"error": error}, "errors.jsonl")
        accounts = [account for name in served(stack) if (account := account_of(stack, name))]
    shares = [account["accounted"] for account in accounts]
    for account in accounts:
        context.record({"accounted": account["accounted"], "causes": account["causes"], **account["facts"]})
    figures = {
        "accounted_p50": median(shares),
        "accounted_min": min(shares),
        "accounted_requests": float(len(shares)),
        "moved_requests": float(sum(account["facts"]["moves"] > 0 for account in accounts)),
        "resumed_requests": float(sum(account["facts"]["attempts"] > 1 for account in accounts)),
        "preempted_requests": float(sum(account["facts"]["preemptions"] > 0 for account in accounts)),
    }
    refused, failed = counted(answers)
    return figures | {"refused_requests": float(refused)}, failed


def counted(answers: Sequence[Answer]) -> tuple[int, int]:
    """Return the numbers of refused and of failed answers. Requests too long for the remaining workers are
    refused."""
    refused = sum(answer.error.startswith("status 4") for answer in answers)
    return refused, sum(not answer.ok for answer in answers) - refused


# --- planted causes


def flood(context: Context) -> dict[str, Any]:
    """Return the account of a short request behind many long ones, on a small worker."""
    dice, ids = context.random("flood"), vocabulary(TINY_CHAT)
    settings: dict[str, object] = {"worker.kv_blocks": 40, "worker.threads": 1, "worker.pie.enabled": False}
    settings |= {"scheduler.policy": "vllm"}
    bodies = [full_answer(drawn_tokens(dice, ids, 160), 120) for _ in range(24)]
    with start_stack(context.run_dir / "flood", settings) as stack:
        late = threading.Thread(target=lambda: run_batch(stack.target, bodies, _DEADLINE_S))
        late.start()
        time.sleep(0.8)
        return explained_one(stack, lambda: run_batch(stack.target, [full_answer([5] * 16, 8)], _DEADLINE_S))


def slow_reader(context: Context) -> dict[str, Any]:
    """Return the account of a client that reads a few MB of log-probabilities slowly."""
    with start_stack(context.run_dir / "reader", {"worker.threads": 1}) as stack:
        target = stack.target
        messages = [{"role": "user", "content": "Tell me a long story."}]
        body = {"model": target.model, "messages": messages, "max_tokens": 400, "n": 8, "stream": True}
        body |= {"logprobs": True, "top_logprobs": 20, "ignore_eos": True, "seed": 1}
        return explained_one(stack, lambda: _trickle(target.port, target.key, json.dumps(body).encode()))


def _trickle(port: int, key: str, body: bytes) -> None:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(_DEADLINE_S)
        client.connect(("127.0.0.1", port))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        head += f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        began_s = time.monotonic()
        while client.recv(65536):
            if time.monotonic() - began_s < 25.0:
                time.sleep(0.05)


def slow_disk(context: Context) -> dict[str, Any]:
    """Return the account of a prompt with blocks on a slow disk. The worker computes even slower, else the
    cache would not load them."""
    dice, ids = context.random("disk"), vocabulary(TINY_CHAT)
    cache = "worker.prefix_cache"
    settings: dict[str, object] = {"worker.kv_blocks": 32, "worker.engine": "simulated"}
    settings |= {"worker.host_memory.blocks": 34, "worker.host_memory.cache_share": 1}
    settings |= {"worker.simulated.speed": 0.02, f"{cache}.disk_mb": 64}
    settings |= {f"{cache}.disk_path": str(context.run_dir / "tier"), f"{cache}.disk_bytes_per_s": 900}
    settings |= {f"{cache}.lookahead_sequences": 0}
    prompts = [drawn_tokens(dice, ids, 400) for _ in range(5)]
    with start_stack(context.run_dir / "disk", settings) as stack:
        for prompt in prompts:
            run_batch(stack.target, [full_answer(prompt, 1)], _DEADLINE_S)
            time.sleep(2.0)
        return explained_one(
            stack, lambda: run_batch(stack.target, [full_answer(prompts[0], 1)], _DEADLINE_S)
        )


def lost_worker(context: Context) -> dict[str, Any]:
    """Return the account of an answer whose worker freezes. Timeouts are many times the answer's duration,
    so that the first cause does not depend on the machine's load."""
    waits = ("gateway.worker_timeout_s", "gateway.frame_timeout_s", "scheduler.worker_timeout_s")
    quiet = dict.fromkeys(waits, _SILENCE_S)
    with start_stack(context.run_dir / "lost", {"worker.threads": 1, **quiet}, workers=2) as stack:
        names = ("worker-0", "worker-1")

        def ask() -> None:
            body = full_answer([5] * 16, 600)
            asking = threading.Thread(target=lambda: run_batch(stack.target, [body], _DEADLINE_S))
            asking.start()
            busy: list[str] = []
            while asking.is_alive() and not (busy := [name for name in names if decodes(stack, name)]):
                time.sleep(0.01)
            for name in busy:
                stack.process(name).send_signal(signal.SIGSTOP)
            asking.join()

        try:
            return explained_one(stack, ask)
        finally:
            for name in names:
                stack.process(name).send_signal(signal.SIGCONT)


def throttled_link(context: Context) -> dict[str, Any]:
    """Return the account of an answer too long for its worker, with blocks borrowed over a slow link."""
    settings: dict[str, object] = {"worker.threads": 1, "worker.kv_blocks": 40, "worker.pie.enabled": False}
    settings |= {"worker.lending.borrow": True, "worker.lending.max_lent_fraction": 1.0}
    settings |= {"worker.lending.keep_free_fraction": 0.0, "worker.lending.link_bytes_per_s": 4_000_000}
    with start_stack(context.run_dir / "link", settings, workers=2) as stack:
        time.sleep(1.0)
        body = full_answer([5] * 700, 60)
        return explained_one(stack, lambda: run_batch(stack.target, [body], _DEADLINE_S))


def decodes(stack: Stack, worker: str) -> bool:
    """Whether the worker decodes, by its last heartbeat."""
    told = _get(stack, f"/ui/workers/{worker}")
    return any(row["state"] == "decoding" for row in told.get("batch", []))


PLANTED: Mapping[str, tuple[Callable[[Context], dict[str, Any]], frozenset[str]]] = {
    "flood": (flood, frozenset({"queued for a worker", "queued at its worker"})),
    "slow reader": (slow_reader, frozenset({"the client read slowly"})),
    "slow disk": (slow_disk, frozenset({"waiting for stored blocks"})),
    "throttled link": (throttled_link, frozenset({"waiting for blocks at other workers"})),
    "lost worker": (lost_worker, frozenset({"its worker was lost"})),
}


# --- requests and their accounts


def explained_one(stack: Stack, ask: Callable[[], object]) -> dict[str, Any]:
    """Return the account of the request that `ask` makes."""
    before = set(served(stack))
    ask()
    deadline_s = time.monotonic() + _DEADLINE_S
    while True:
        fresh = [name for name in served(stack) if name not in before]
        accounts = [account for name in fresh if (account := account_of(stack, name))]
        if accounts:
            return min(accounts, key=lambda account: -account["begin_s"])
        if time.monotonic() > deadline_s:
            raise TimeoutError("the gateway has logged no such request")
        time.sleep(0.1)


def served(stack: Stack) -> list[str]:
    """Return the requests with an answer, from the gateway's log."""
    lines = (stack.run_dir / "logs" / "gateway-0.log").read_text().splitlines()
    entries = [json.loads(line) for line in lines if '"event":"request"' in line]
    return [entry["request_id"] for entry in entries if entry.get("completion_tokens")]


def account_of(stack: Stack, request_id: str) -> dict[str, Any] | None:
    return _get(stack, f"/ui/requests/{request_id}").get("account")


def _get(stack: Stack, path: str) -> dict[str, Any]:
    state = json.loads((Path(stack.run_dir) / "state.json").read_text())
    return dict(httpx.get(f"{state['operator_url']}{path}", timeout=60).json())
