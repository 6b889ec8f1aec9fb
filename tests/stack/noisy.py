"""All services in one process, on a real nats-server, and noise on every subject that any of them serves.

What is served is read from the services' own tables, so that a new subject is in it by itself.
"""

import asyncio
import hashlib
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from services.gateway.config import GatewayConfig
from services.gateway.service import run as run_gateway
from services.ledger.config import LedgerConfig
from services.ledger.service import run as run_ledger
from services.placement.config import PlacementConfig
from services.placement.service import run as run_placement
from services.predictor.config import PredictorConfig
from services.predictor.service import run as run_predictor
from services.scheduler.config import SchedulerConfig
from services.scheduler.service import run as run_scheduler
from services.stack.obstructions import free_port
from services.worker.config import WorkerConfig
from services.worker.service import run as run_worker
from shared import subjects
from shared.bus import Endpoint, Listener
from shared.config import BusConfig
from shared.errors import InvalidMessage
from shared.messages.base import decode
from shared.messages.reports import WorkerReported
from shared.messages.tokens import TokenFrame
from tests.patience import STACK_PATIENCE_S
from tests.shared.messages.noise import Noise
from tests.stack.running import TINY_CHAT

KEY = "sk-noise"
PROMPTS = ("Tell me a short story.", "Who are you?", "What is the sun?", "Say hello to a fox.")
STRANGER = "gateway-x"
"""A gateway that has submitted nothing, and speaks of what others have."""


@dataclass(frozen=True)
class Target:
    """One subject of one instance."""

    subject: str
    message: type[Any]

    def __str__(self) -> str:
        return f"{self.subject.removeprefix(subjects.PREFIX + '.')} {self.message.__name__}"


@dataclass
class NoisyStack:
    """The services, by instance, as tasks that must not end."""

    port: int
    running: dict[str, asyncio.Task[None]]
    http: httpx.AsyncClient
    nats: Client
    expected: dict[tuple[str, float], str] = field(default_factory=dict)
    names: list[str] = field(default_factory=lambda: [f"req_{number}" for number in range(20)])
    """Of requests: made up, and the latest that are being answered."""

    async def note(self, msg: Msg) -> None:
        """A frame of tokens passes by: what it is about has a name that noise may use."""
        with suppress(InvalidMessage, IndexError):  # it may be noise itself
            self.names[:] = [*self.names[1:], decode(msg.data, TokenFrame).deltas[0].request_id]

    async def ask(self, prompt: str, temperature: float) -> str:
        """The answer's text; the seed is fixed."""
        body = {
            "model": TINY_CHAT.name,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 24,
            "seed": 3,
            "temperature": temperature,
        }
        answer = await self.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    async def learn(self) -> None:
        """What the answers are as long as nobody disturbs."""
        for prompt in PROMPTS:
            for temperature in (0.0, 1.0):
                self.expected[prompt, temperature] = await self.ask(prompt, temperature)

    def check_alive(self) -> None:
        for name, task in self.running.items():
            assert not task.done(), f"{name} has ended: {task}"

    async def disturb(self, target: Target, messages: int, seed: int) -> Counter[str]:
        """Noise on one subject while answers are asked for. Returns what became of those."""
        outcomes: Counter[str] = Counter()
        stop = asyncio.Event()
        load = asyncio.create_task(self._load(stop, outcomes, random.Random(seed)))
        noise = Noise(seed, await self._pools(target))
        reply = self.nats.new_inbox()
        for number in range(messages):
            payload = noise.payload(target.message)
            if len(payload) <= self.nats.max_payload:
                await self.nats.publish(target.subject, payload, reply=reply)
            if number % 20 == 19:
                await self.nats.flush()
                await asyncio.sleep(0.005)
        await self.nats.flush()
        stop.set()
        await load
        self.check_alive()
        return outcomes

    async def _load(self, stop: asyncio.Event, outcomes: Counter[str], pick: random.Random) -> None:
        """One answer after another; at least one after the noise."""
        is_last = False
        while not is_last:
            is_last = stop.is_set()
            asked = pick.choice(list(self.expected))
            try:
                same = await self.ask(*asked) == self.expected[asked]
                outcomes["same" if same else "changed"] += 1
            except (AssertionError, httpx.HTTPError) as error:
                outcomes[f"failed: {error}"[:200]] += 1

    async def _pools(self, target: Target) -> Mapping[str, Sequence[Any]]:
        """What is true at this moment: so that the noise gets past the first check."""
        seen: dict[str, WorkerReported] = {}
        subscription = await self.nats.subscribe(subjects.ANY_WORKER_REPORTED)
        async with asyncio.timeout(STACK_PATIENCE_S):
            while len(seen) < sum(name.startswith("worker") for name in self.running):
                report = decode((await subscription.next_msg(timeout=STACK_PATIENCE_S)).data, WorkerReported)
                seen[report.worker_id] = report
        await subscription.unsubscribe()
        last = target.subject.rsplit(".", 1)[-1]
        workers = [last] if last.startswith("worker") else [*seen, "worker-x"]
        reports = list(seen.values())
        return {
            "worker_id": workers,
            "gateway_id": [STRANGER if last == STRANGER else "gateway-0"],
            "incarnation": [report.incarnation for report in reports],
            "epoch": [report.epoch for report in reports],
            "fingerprint": [report.fingerprint for report in reports],
            "weights": [report.weights for report in reports],
            "model": [report.model for report in reports],
            "block_tokens": [report.block_tokens for report in reports],
            "debtor_id": [last if last.startswith("worker") else "worker-x"],
            "creditor_id": ["worker-1", "worker-x"],
            "sender": [last],
            "request_id": self.names if last == STRANGER else [f"req_{number}" for number in range(20)],
            "attempt": [1, 2],
            "choice": [0, 1],
            "prompt": [bytes((1, 0, 0, 0, 2, 0, 0, 0))],
            "generated": [b"", bytes((1, 0, 0, 0))],
        }


def may_publish(user: str, subject: str) -> bool:
    """As the table of permissions has it."""
    tokens = subject.split(".")
    patterns = [one.split(".") for one in subjects.permissions_of(user).publish]
    same = [one for one in patterns if len(one) == len(tokens)]
    return any(all(a in ("*", b) for a, b in zip(one, tokens, strict=True)) for one in same)


def targets() -> list[Target]:
    """Every subject that some instance serves, with the message that is meant for it."""
    found: dict[str, Target] = {}
    tables = {name: vars(module).get("HANDLERS", ()) for name, module in list(sys.modules.items())}
    for name, table in tables.items():
        if not name.startswith("services."):
            continue
        for handler in table:
            if not isinstance(handler, Endpoint | Listener):
                continue
            message = handler.message if isinstance(handler, Listener) else handler.request
            service = name.split(".")[1]
            subject = handler.subject if isinstance(handler.subject, str) else handler.subject(f"{service}-0")
            is_gateways = may_publish(STRANGER, subject.replace("*", STRANGER))
            sender = STRANGER if is_gateways else "worker-9" if ".cmd." in subject else "worker-0"
            found[subject] = Target(subject.replace("*", sender), message)
    return [found[subject] for subject in sorted(found)]


@asynccontextmanager
async def noisy_stack(bus: BusConfig, *, workers: int = 2, **worker: Any) -> AsyncIterator[NoisyStack]:
    """Six services in this event loop; ended afterwards."""
    port = free_port()
    model = {"model": str(TINY_CHAT), "served_name": TINY_CHAT.name, "bus": bus}
    keys = (hashlib.sha256(KEY.encode()).hexdigest(),)
    starts: dict[str, Coroutine[Any, Any, None]] = {
        "scheduler-0": run_scheduler(SchedulerConfig(bus=bus, instance="scheduler-0")),
        "predictor-0": run_predictor(PredictorConfig(bus=bus, instance="predictor-0")),
        "placement-0": run_placement(PlacementConfig(bus=bus, instance="placement-0")),
        "ledger-0": run_ledger(LedgerConfig(bus=bus, instance="ledger-0")),
    }
    front = {**model, "instance": "gateway-0", "port": port, "api_key_sha256": keys, "shutdown_grace_s": 0.5}
    starts["gateway-0"] = run_gateway(GatewayConfig.model_validate(front))
    running = {name: asyncio.create_task(work, name=name) for name, work in starts.items()}
    headers = {"authorization": f"Bearer {KEY}"}
    client = await nats.connect(bus.url)
    try:
        for number in range(workers):  # one after the other: models are not loaded in two threads at once
            name = f"worker-{number}"
            settings = {**model, "instance": name, "kv_blocks": 256, **worker}
            begun = await client.subscribe(subjects.worker_reported(name))
            running[name] = asyncio.create_task(run_worker(WorkerConfig.model_validate(settings)), name=name)
            await begun.next_msg(timeout=STACK_PATIENCE_S)
            await begun.unsubscribe()
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=STACK_PATIENCE_S
        ) as http:
            stack = NoisyStack(port, running, http, client)
            await client.subscribe(subjects.tokens.to("gateway-0"), cb=stack.note)
            await _until_ready(stack)
            yield stack
    finally:
        await client.close()
        for task in running.values():
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)


async def _until_ready(stack: NoisyStack) -> None:
    async with asyncio.timeout(STACK_PATIENCE_S):
        while True:
            stack.check_alive()
            try:
                if (await stack.http.get("/ready")).status_code == 200:
                    return
            except httpx.ConnectError:
                pass
            await asyncio.sleep(0.05)
