"""What a seed means: the stack's shape, the questions of its clients, and what goes wrong when."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from services.worker.core.settings import LendingConfig
from tests.simulation.clients import Question
from tests.simulation.fleet import Shape

QUESTIONS_BEGIN_S = 0.8
TROUBLE_ENDS_S = 6.0
"""From then on nothing goes wrong any more, but what lasts, and servers without a majority."""
_BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Fault:
    """Something goes wrong at `at_s`, with `target` (a process, or nothing), for `for_s`."""

    at_s: float
    kind: str
    target: str = ""
    for_s: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        return f"{self.at_s:.3f} {self.kind} {self.target} for {self.for_s:.3f} s ({self.amount:.3f})"


@dataclass(frozen=True)
class Schedule:
    """All of one run."""

    seed: int
    shape: Shape
    questions: tuple[Question, ...]
    faults: tuple[Fault, ...] = field(default=())

    @classmethod
    def of(cls, seed: int) -> "Schedule":
        chance = random.Random(f"schedule {seed}")
        shape = _shape(chance)
        questions, faults = _questions(chance, shape), _faults(chance, shape)
        schedule = cls(seed, shape, questions, faults)
        for name, (share, focus) in _FOCI.items():
            chance = random.Random(f"{name} {seed}")
            if chance.random() < share:
                schedule = focus(chance, schedule)
        own_tokens = _own_tokens(schedule.shape)
        marked = (replace(each, is_long=each.most_tokens > own_tokens) for each in schedule.questions)
        return replace(schedule, questions=tuple(marked))

    @property
    def trouble_ends_s(self) -> float:
        return max(TROUBLE_ENDS_S, *(fault.at_s + fault.for_s for fault in self.faults), 0.0)


def _own_tokens(shape: Shape) -> int:
    """What a worker holds by itself: where it borrows from the start, less what it keeps to copy into."""
    worker = shape.settings["worker"]
    lending = LendingConfig(**worker.get("lending", {}))
    kept_blocks = lending.bounce_blocks if lending.borrow is True else 0
    return int(worker["kv_blocks"] - kept_blocks) * _BLOCK_TOKENS


def _host_memory(cache_blocks: int, lent_blocks: int = 0) -> dict[str, Any]:
    blocks = cache_blocks + lent_blocks
    return {"blocks": blocks, "cache_share": cache_blocks / blocks, "lent_share": lent_blocks / blocks}


def _shape(chance: random.Random) -> Shape:
    is_moving = chance.random() < 0.5
    blocks = chance.choice((20, 28, 40, 64))
    cache: dict[str, Any] = {"eviction": chance.choice(("frequent", "lru", "fifo", "random"))}
    memory = _host_memory(chance.choice((8, 16, 64)))
    if chance.random() < 0.4:
        cache |= {"disk_mb": 1, "disk_path": "/tmp/kvasir-simulation"}
    return Shape(
        gateways=chance.choice((1, 2, 2)),
        schedulers=chance.choice((1, 1, 2)),
        workers=chance.choice((2, 2, 3)),
        settings={
            "worker": {
                "kv_blocks": blocks,
                "host_memory": memory,
                "prefix_cache": cache,
                "gateway_timeout_s": 4.0,
            },
            "scheduler": {
                "gateway_timeout_s": 4.0,
                "lease_ttl_s": 1.0,
                "token_budget": chance.choice((64, 128, 512)),
                "policy": chance.choice(("kvasir", "kvasir", "kvasir", "vllm", "orca", "fastgen", "srtf")),
            },
            "placement": {
                "policy": chance.choice(
                    ("mell", "mell_eager", "load_balance")
                    if is_moving
                    else ("best_fit", "worst_fit", "prefix_aware")
                ),
                "roles": "both" if is_moving else chance.choice(("both", "both", "adaptive")),
            },
        },
    )


def _questions(chance: random.Random, shape: Shape) -> tuple[Question, ...]:
    most_tokens = shape.settings["worker"]["kv_blocks"] * _BLOCK_TOKENS - 80
    common = [tuple(chance.randrange(300, 3000) for _ in range(200)) for _ in range(2)]
    questions = []
    for number in range(chance.randint(2, 7)):
        beginning = chance.choice(common)[: chance.choice((0, 16, 48, 100, 200))]
        own = tuple(chance.randrange(300, 3000) for _ in range(chance.randint(1, 60)))
        prompt = (beginning + own)[:most_tokens]
        at_s = QUESTIONS_BEGIN_S + chance.random() * 2.5
        is_named = chance.random() < 0.4
        questions.append(
            Question(
                at_s=at_s,
                seed=chance.randrange(200),
                prompt=prompt,
                max_tokens=chance.choice((1, 4, 12, 30, 60)),
                n=chance.choice((1, 1, 1, 2)),
                is_streamed=chance.random() < 0.8,
                name=f"question-{number}" if is_named else "",
                leaves_after=chance.randint(1, 6) if chance.random() < 0.1 else None,
            )
        )
    return tuple(questions)


# --- what some seeds are mostly about: chance alone would come to it too seldom


def _lending(chance: random.Random, schedule: Schedule) -> Schedule:
    """Workers share their KV, and one or two questions are longer than what one of them has."""
    shape, questions = schedule.shape, schedule.questions
    share = chance.choice((0.0, 0.0, 0.3))
    lending: dict[str, Any] = {
        "borrow": chance.choice((True, "auto")),
        "max_lent_fraction": 1.0,
        "keep_free_fraction": 0.0,
        "low_fraction": share,
        "high_fraction": share,
        "lent_blocks": chance.choice((0, 0, 16)),
        "host_attention": chance.choice(("compute", "fetch")),
        "max_remote_attention_fraction": chance.choice((0.0, 0.25, 0.25)),
        "lease_s": chance.choice((1.0, 3.0)),
        "rest_s": 0.1,
    }
    memory = _host_memory(shape.settings["worker"]["host_memory"]["blocks"], lending.pop("lent_blocks"))
    worker = {**shape.settings["worker"], "host_memory": memory, "lending": lending}
    own_tokens = worker["kv_blocks"] * _BLOCK_TOKENS

    def longer(question: Question) -> Question:
        tokens = int(own_tokens * chance.uniform(1.05, 1.35))
        more = tuple(chance.randrange(300, 3000) for _ in range(tokens - len(question.prompt)))
        most = own_tokens * 3 // 2 - tokens - _BLOCK_TOKENS  # Two workers take no longer ones altogether.
        prompt, max_tokens = question.prompt + more, min(question.max_tokens, most)
        return replace(question, prompt=prompt, max_tokens=max_tokens, n=1, is_long=True)

    long = tuple(longer(each) if chance.random() < 0.8 else each for each in questions[:2])
    return replace(schedule, shape=_with(shape, "worker", worker), questions=(*long, *questions[2:]))


def _hanging(chance: random.Random, schedule: Schedule) -> Schedule:
    """Copies of some workers hang, some for longer than whoever waits for them is willing to."""
    shape = schedule.shape
    worker = {**shape.settings["worker"], "transfer": {"answer_s": chance.choice((0.2, 0.5, 5.0))}}
    targets = [f"worker-{chance.randrange(shape.workers)}" for _ in range(chance.randint(1, 4))]
    more = _some(chance, ("copies hang",), targets, (0.3, 1.0, 3.0))
    return replace(schedule, shape=_with(shape, "worker", worker), faults=_in_order(schedule.faults + more))


def _moves(chance: random.Random, schedule: Schedule) -> Schedule:
    """Long answers change workers while they run, mostly with their KV."""
    shape = schedule.shape
    if chance.random() < 0.5:
        roles: Any = ["prefill", *["decode"] * (shape.workers - 1)]
        placement = {"policy": chance.choice(("best_fit", "prefix_aware")), "roles": roles}
    else:
        placement = {"policy": chance.choice(("mell_eager", "load_balance")), "roles": "both", "epoch_s": 0.1}
    placement["move_mode"] = chance.choice(("kv", "kv", "kv", "adaptive", "tokens"))
    long = tuple(_with_answer(question, chance.choice((30, 60))) for question in schedule.questions)
    moving = replace(schedule, shape=_with(shape, "placement", placement), questions=long)
    return _hanging(chance, moving) if chance.random() < 0.4 else moving


def _rivals(chance: random.Random, schedule: Schedule) -> Schedule:
    """Two schedulers, of which one is away for about as long as its lease lasts, while long answers run."""
    targets = [f"scheduler-{chance.randrange(2)}" for _ in range(chance.randint(1, 3))]
    more = _some(chance, ("freeze", "freeze", "cut", "slow"), targets, (1.0, 1.5, 2.5))
    long = tuple(_with_answer(question, 60) for question in schedule.questions)
    shape = replace(schedule.shape, schedulers=2)
    return replace(schedule, shape=shape, questions=long, faults=_in_order(schedule.faults + more))


def _hangs(chance: random.Random, schedule: Schedule) -> Schedule:
    """Processes hang while long answers run: some come back late, some are replaced."""
    kind = chance.choice(("scheduler", "worker", "worker", "gateway"))
    shape = replace(schedule.shape, schedulers=2) if kind == "scheduler" else schedule.shape
    names = [name for name in shape.names if name.startswith(kind)]
    targets = [chance.choice(names) for _ in range(chance.randint(1, 3))]
    more = _some(chance, ("hang", "loop hangs"), targets, (1.0, 2.0, 4.0))
    questions = schedule.questions
    if len(questions) < 10:  # more of them would not be answered in time
        questions = tuple(_with_answer(question, 60) for question in questions)
    return replace(schedule, shape=shape, questions=questions, faults=_in_order(schedule.faults + more))


def _shards(chance: random.Random, schedule: Schedule) -> Schedule:
    """One to three schedulers lead two or three shards. Most of them die, hang, or are away for a while."""
    shape = replace(
        schedule.shape, schedulers=chance.choice((1, 2, 2, 2, 3)), workers=chance.choice((2, 3, 4, 4))
    )
    scheduler = {**shape.settings["scheduler"], "shards": chance.choice((2, 2, 2, 3))}
    if isinstance(shape.settings["placement"]["roles"], list):  # a shard may have a single worker
        shape = _with(shape, "placement", {**shape.settings["placement"], "roles": "adaptive"})
    targets = [f"scheduler-{chance.randrange(shape.schedulers)}" for _ in range(chance.randint(0, 3))]
    targets += [f"worker-{chance.randrange(shape.workers)}" for _ in range(chance.choice((0, 0, 1)))]
    kinds = ("kill", "kill", "hang", "loop hangs", "freeze", "cut")
    more = _some(chance, kinds, targets, (0.5, 1.0, 2.0, 4.0))
    again = tuple(
        replace(question, at_s=question.at_s + chance.random(), seed=chance.randrange(200), name="")
        for question in schedule.questions
        if not question.is_long
    )
    return replace(
        schedule,
        shape=_with(shape, "scheduler", scheduler),
        questions=(*schedule.questions, *again)[:20],
        faults=_in_order(schedule.faults + more),
    )


def _servers(chance: random.Random, schedule: Schedule) -> Schedule:
    """Three nats-servers. Some die or hang, or do not reach each other, while long answers run."""
    targets = [f"nats-{chance.randrange(3)}" for _ in range(chance.randint(0, 4))]
    kinds = ("server dies", "server hangs", "route breaks", "host is lost", "host is lost")
    more = _some(chance, kinds, targets, (0.3, 1.0, 2.0, 4.0))
    if chance.random() < 0.1:
        more += (Fault(chance.uniform(0.9, 2.0), "no majority", for_s=chance.uniform(5.0, 25.0)),)
    shape = replace(
        schedule.shape, servers=3, schedulers=max(schedule.shape.schedulers, chance.choice((1, 2)))
    )
    questions = schedule.questions
    if len(questions) < 10:  # as where processes hang
        questions = tuple(_with_answer(question, 60) for question in questions)
    return replace(schedule, shape=shape, questions=questions, faults=_in_order(schedule.faults + more))


def _worn_disks(chance: random.Random, schedule: Schedule) -> Schedule:
    """What is asked was asked before, most of it has left memory for the disk, and disks flip bits."""
    shape = schedule.shape
    cache = {**shape.settings["worker"]["prefix_cache"], "disk_mb": 1, "disk_path": "/tmp/kvasir-simulation"}
    memory = _host_memory(chance.choice((4, 8)))
    worker = {**shape.settings["worker"], "kv_blocks": 20, "host_memory": memory, "prefix_cache": cache}
    prompts = [question.prompt[: 20 * _BLOCK_TOKENS - 80] for question in schedule.questions]
    questions = tuple(
        replace(
            schedule.questions[number % len(prompts)],
            at_s=QUESTIONS_BEGIN_S + 0.5 * number,
            prompt=chance.choice(prompts),
            name="",
            is_long=False,
        )
        for number in range(8)
    )
    targets = [f"worker-{number}" for number in range(shape.workers)]
    more = tuple(Fault(1.0, "disk corrupt", target, 5.0, chance.choice((0.05, 0.3))) for target in targets)
    faults = _in_order(schedule.faults + more)
    return replace(schedule, shape=_with(shape, "worker", worker), questions=questions, faults=faults)


def _keeping(chance: random.Random, schedule: Schedule) -> Schedule:
    """Prefix caches have what leaves their small host memory at other workers; what is asked was mostly asked
    before. Who keeps it is away for a while, or has worn memory, or sequences need it."""
    shape = replace(schedule.shape, workers=chance.choice((2, 2, 2, 3)))
    worker = shape.settings["worker"]
    is_lending = "lending" in worker
    blocks = worker["kv_blocks"] if is_lending else chance.choice((16, 20))
    cache = {
        **worker["prefix_cache"],
        "cache_blocks": chance.choice((4, 8)),
        "peer_blocks": chance.choice((8, 32, 96)),
        "shadow_share": chance.choice((0.0, 0.5)),
    }
    lending = {
        "lease_s": chance.choice((0.5, 1.0, 3.0)),
        **worker.get("lending", {}),
        "lent_blocks": chance.choice((8, 32, 96)),
        "answer_s": chance.choice((0.1, 1.0)),
    }
    memory = _host_memory(cache.pop("cache_blocks"), lending.pop("lent_blocks"))
    own = {"kv_blocks": blocks, "host_memory": memory, "prefix_cache": cache, "lending": lending}
    worker = {**worker, **own}
    most_tokens = blocks * _BLOCK_TOKENS - 80
    prompts = [tuple(chance.randrange(300, 3000) for _ in range(200)) for _ in range(chance.randint(2, 4))]
    long = tuple(question for question in schedule.questions if question.is_long)
    between_s = chance.choice((0.15, 0.2, 0.25))
    again = tuple(
        replace(
            chance.choice(schedule.questions),
            at_s=QUESTIONS_BEGIN_S + between_s * number,
            seed=chance.randrange(200),
            prompt=chance.choice(prompts)[: min(most_tokens, chance.choice((100, 200, 200)))],
            max_tokens=chance.choice((1, 4, 30)),
            name="",
            is_long=False,
        )
        for number in range(20)
    )
    targets = [f"worker-{chance.randrange(shape.workers)}" for _ in range(chance.choice((0, 1, 1, 2, 3)))]
    kinds = ("kill", "freeze", "cut", "slow", "memory worn", "memory worn")
    more = _some(chance, kinds, targets, (0.1, 0.6, 1.5, 3.0))
    return replace(
        schedule,
        shape=_with(shape, "worker", worker),
        questions=(*long, *again),
        faults=_in_order(schedule.faults + more),
    )


def _some(
    chance: random.Random, kinds: Sequence[str], targets: Sequence[str], lengths_s: Sequence[float]
) -> tuple[Fault, ...]:
    """One fault for each of `targets`."""
    faults = []
    for target in targets:
        at_s = QUESTIONS_BEGIN_S + chance.random() * 4.0
        for_s = min(TROUBLE_ENDS_S - at_s, chance.choice(lengths_s) * (0.7 + 0.6 * chance.random()))
        faults.append(Fault(at_s, chance.choice(kinds), target, for_s, chance.choice((0.05, 0.2))))
    return tuple(faults)


def _with_answer(question: Question, max_tokens: int) -> Question:
    """Where the prompt is longer than a worker, the rest of what others lend has been reckoned with."""
    return question if question.is_long else replace(question, max_tokens=max_tokens)


def _with(shape: Shape, service: str, settings: dict[str, Any]) -> Shape:
    return replace(shape, settings={**shape.settings, service: settings})


_FOCI: dict[str, tuple[float, Callable[[random.Random, Schedule], Schedule]]] = {
    "lending": (0.3, _lending),
    "moves": (0.25, _moves),
    "copies": (0.2, _hanging),
    "rivals": (0.15, _rivals),
    "disks": (0.15, _worn_disks),
    "keeping": (0.2, _keeping),
    "hangs": (0.2, _hangs),
    "shards": (0.3, _shards),
    "servers": (0.3, _servers),
}
"""Which share of seeds has it."""


_KINDS = (
    *("kill",) * 5,
    *("freeze",) * 3,
    *("cut",) * 3,
    *("reset",) * 2,
    *("noise",) * 4,
    *("slow",) * 2,
    *("skew",) * 2,
    *("disk corrupt",) * 2,
    *("wall clock",) * 2,
    *("leap",) * 2,
    "terminate",
    "part",
    "bus down",
    "slow all",
    "disk full",
    "disk fails",
)


def _faults(chance: random.Random, shape: Shape) -> tuple[Fault, ...]:
    names = shape.names
    faults = []
    for _ in range(chance.choice((0, 1, 1, 2, 2, 3, 4, 6))):
        kind = chance.choice(_KINDS)
        at_s = QUESTIONS_BEGIN_S - 0.5 + chance.random() * 4.0
        target = chance.choice(names)
        if kind.startswith("disk"):
            target = f"worker-{chance.randrange(shape.workers)}"
        most_s = TROUBLE_ENDS_S - at_s
        for_s = min(most_s, chance.choice((0.05, 0.3, 1.0, 3.0, 6.0)) * (0.5 + chance.random()))
        amount = chance.choice((0.01, 0.05, 0.2))
        faults.append(Fault(at_s, kind, target, for_s, amount))
    return _in_order(faults)


def _in_order(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    return tuple(sorted(faults, key=lambda fault: fault.at_s))
