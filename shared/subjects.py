"""Every subject on the bus, the only place where one is built, and who may use which.

`kvasir.v1.cmd.<service>.<verb>[.<id>]`, `kvasir.v1.evt.<service>.<past participle>[.<id>]` and
`kvasir.v1.tok.<gateway id>`.
Ids are configured by the operator and checked here; no string that a client sent ever enters a subject.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

PREFIX = "kvasir.v1"
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

SERVICES = ("gateway", "scheduler", "predictor", "placement", "ledger", "worker")
OPERATOR = "operator"
"""Who asks every service for its status: the supervisor, `services status`, `nats micro ls`."""

SCHEDULER_SUBMIT = f"{PREFIX}.cmd.scheduler.submit"
SCHEDULER_CANCEL = f"{PREFIX}.cmd.scheduler.cancel"
SCHEDULER_MOVE = f"{PREFIX}.cmd.scheduler.move"
PREDICTOR_PREDICT = f"{PREFIX}.cmd.predictor.predict"
PLACEMENT_PLACE = f"{PREFIX}.cmd.placement.place"
LEDGER_CANDIDATES = f"{PREFIX}.cmd.ledger.candidates"

SCHEDULER_ANNOUNCED = f"{PREFIX}.evt.scheduler.announced"
SCHEDULER_WORKER_LOST = f"{PREFIX}.evt.scheduler.lost"
SCHEDULER_PREPARED = f"{PREFIX}.evt.scheduler.prepared"
"""Another worker is ready for a sequence: its gateway may hand it over."""
SCHEDULER_MOVED = f"{PREFIX}.evt.scheduler.moved"
"""A migration is over, whichever way."""
PLACEMENT_WANTED = f"{PREFIX}.evt.placement.wanted"
"""How many workers should run, and which need not."""
GATEWAY_FINISHED = f"{PREFIX}.evt.gateway.finished"
ANY_GATEWAY_REPORTED = f"{PREFIX}.evt.gateway.reported.*"
ANY_WORKER_REPORTED = f"{PREFIX}.evt.worker.reported.*"
ANY_WORKER_STEPPED = f"{PREFIX}.evt.worker.stepped.*"
ANY_WORKER_CACHED = f"{PREFIX}.evt.worker.cached.*"
LEDGER_OFFERED = f"{PREFIX}.evt.ledger.offered"
LEDGER_ANNOUNCED = f"{PREFIX}.evt.ledger.announced"

LEASE_BUCKET = "kvasir_leases"
"""JetStream key-value bucket; the key is the name of the role, the value its holder."""


def checked_id(value: str) -> str:
    """`value` when it can be one token of a subject. Raises ValueError naming the rule otherwise."""
    if not _ID.fullmatch(value):
        raise ValueError(f"{value!r} is no instance id: 1 to 64 of A-Z a-z 0-9 _ -")
    return value


def status(service: str) -> str:
    """Scatter-gather: every instance of the service answers."""
    return f"{PREFIX}.cmd.{checked_id(service)}.status"


def worker_plan(worker_id: str) -> str:
    return f"{PREFIX}.cmd.worker.plan.{checked_id(worker_id)}"


def worker_snapshot(worker_id: str) -> str:
    return f"{PREFIX}.cmd.worker.snapshot.{checked_id(worker_id)}"


def worker_cancel(worker_id: str) -> str:
    return f"{PREFIX}.cmd.worker.cancel.{checked_id(worker_id)}"


def worker_fetch(worker_id: str) -> str:
    return f"{PREFIX}.cmd.worker.fetch.{checked_id(worker_id)}"


def worker_extend(worker_id: str) -> str:
    """To the worker that takes a sequence over, from its gateway."""
    return f"{PREFIX}.cmd.worker.extend.{checked_id(worker_id)}"


def worker_acknowledge(worker_id: str) -> str:
    return f"{PREFIX}.cmd.worker.acknowledge.{checked_id(worker_id)}"


def worker_prefixes(worker_id: str) -> str:
    return f"{PREFIX}.cmd.worker.prefixes.{checked_id(worker_id)}"


def worker_want(worker_id: str) -> str:
    """From the scheduler: a sequence waits there that needs more KV than the worker has."""
    return f"{PREFIX}.cmd.worker.want.{checked_id(worker_id)}"


def worker_pull(worker_id: str) -> str:
    """To the target of a migration: fetch blocks from its source."""
    return f"{PREFIX}.cmd.worker.pull.{checked_id(worker_id)}"


def worker_dial(worker_id: str) -> str:
    """To a worker that is about to be dialled on the bulk plane, from who will dial."""
    return f"{PREFIX}.cmd.worker.dial.{checked_id(worker_id)}"


def worker_borrow(worker_id: str) -> str:
    """To the creditor, from a worker that is short of KV."""
    return f"{PREFIX}.cmd.worker.borrow.{checked_id(worker_id)}"


def worker_renew(worker_id: str) -> str:
    """To the creditor, from its debtor."""
    return f"{PREFIX}.cmd.worker.renew.{checked_id(worker_id)}"


def worker_repay(worker_id: str) -> str:
    """To the creditor, from its debtor."""
    return f"{PREFIX}.cmd.worker.repay.{checked_id(worker_id)}"


def worker_settle(worker_id: str) -> str:
    """To a worker in a cycle of debts, from the ledger."""
    return f"{PREFIX}.cmd.worker.settle.{checked_id(worker_id)}"


def worker_reported(worker_id: str) -> str:
    return f"{PREFIX}.evt.worker.reported.{checked_id(worker_id)}"


def worker_stepped(worker_id: str) -> str:
    return f"{PREFIX}.evt.worker.stepped.{checked_id(worker_id)}"


def worker_cached(worker_id: str) -> str:
    """What came into its prefix cache and what left it."""
    return f"{PREFIX}.evt.worker.cached.{checked_id(worker_id)}"


def gateway_reported(gateway_id: str) -> str:
    return f"{PREFIX}.evt.gateway.reported.{checked_id(gateway_id)}"


def tokens(gateway_id: str) -> str:
    return f"{PREFIX}.tok.{checked_id(gateway_id)}"


def inbox_prefix(user: str) -> str:
    """Where the answers to a user's own questions arrive; nobody else may listen there."""
    return f"_INBOX_{checked_id(user)}"


def micro_name(service: str) -> str:
    """The service's name in NATS micro discovery."""
    return f"kvasir-{checked_id(service)}"


@dataclass(frozen=True)
class Permissions:
    """What one NATS user may do, as patterns with the wildcards of NATS; all else is refused."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    may_answer: bool
    """Once, to the reply subject of each message that reaches it, and to no other inbox."""


def _every(build: Callable[[str], str]) -> str:
    return f"{build('0').removesuffix('0')}*"


def _service(name: str, *, publish: tuple[str, ...] = (), subscribe: tuple[str, ...]) -> Permissions:
    """With what every service has: its inbox, its status, and being found by `nats micro`."""
    found = tuple(
        f"$SRV.{verb}{whom}"
        for verb in ("PING", "INFO", "STATS")
        for whom in ("", f".{micro_name(name)}", f".{micro_name(name)}.*")
    )
    own = (status(name), f"{inbox_prefix(name)}.>", *found)
    return Permissions(publish=publish, subscribe=(*subscribe, *own), may_answer=True)


_LEASE_STREAM = f"KV_{LEASE_BUCKET}"
_LEASE_PUBLISH = (
    f"$JS.API.STREAM.INFO.{_LEASE_STREAM}",
    f"$JS.API.STREAM.CREATE.{_LEASE_STREAM}",
    f"$JS.API.STREAM.MSG.GET.{_LEASE_STREAM}",
    f"$KV.{LEASE_BUCKET}.scheduler",
)

PERMISSIONS: Mapping[str, Permissions] = {
    "gateway": _service(
        "gateway",
        publish=(
            SCHEDULER_SUBMIT,
            SCHEDULER_CANCEL,
            _every(worker_cancel),
            _every(worker_fetch),
            _every(worker_extend),
            _every(worker_acknowledge),
            ANY_GATEWAY_REPORTED,
            GATEWAY_FINISHED,
        ),
        subscribe=(
            _every(tokens),
            ANY_WORKER_REPORTED,
            SCHEDULER_ANNOUNCED,
            SCHEDULER_WORKER_LOST,
            SCHEDULER_PREPARED,
        ),
    ),
    "scheduler": _service(
        "scheduler",
        publish=(
            PREDICTOR_PREDICT,
            PLACEMENT_PLACE,
            _every(worker_plan),
            _every(worker_snapshot),
            _every(worker_cancel),
            _every(worker_fetch),
            _every(worker_want),
            _every(worker_pull),
            SCHEDULER_ANNOUNCED,
            SCHEDULER_WORKER_LOST,
            SCHEDULER_PREPARED,
            SCHEDULER_MOVED,
            *_LEASE_PUBLISH,
        ),
        subscribe=(
            SCHEDULER_SUBMIT,
            SCHEDULER_CANCEL,
            SCHEDULER_MOVE,
            ANY_WORKER_REPORTED,
            ANY_WORKER_STEPPED,
            ANY_GATEWAY_REPORTED,
        ),
    ),
    "predictor": _service("predictor", subscribe=(PREDICTOR_PREDICT, GATEWAY_FINISHED)),
    "placement": _service(
        "placement",
        publish=(_every(worker_prefixes), SCHEDULER_MOVE, PLACEMENT_WANTED),
        subscribe=(
            PLACEMENT_PLACE,
            ANY_WORKER_REPORTED,
            ANY_WORKER_STEPPED,
            ANY_WORKER_CACHED,
            SCHEDULER_MOVED,
        ),
    ),
    "ledger": _service(
        "ledger",
        publish=(LEDGER_OFFERED, LEDGER_ANNOUNCED, _every(worker_settle)),
        subscribe=(LEDGER_CANDIDATES, ANY_WORKER_REPORTED, LEDGER_OFFERED, LEDGER_ANNOUNCED),
    ),
    "worker": _service(
        "worker",
        publish=(
            _every(tokens),
            ANY_WORKER_REPORTED,
            ANY_WORKER_STEPPED,
            ANY_WORKER_CACHED,
            LEDGER_CANDIDATES,
            _every(worker_borrow),
            _every(worker_renew),
            _every(worker_repay),
            _every(worker_dial),
        ),
        subscribe=(
            _every(worker_borrow),
            _every(worker_renew),
            _every(worker_repay),
            _every(worker_settle),
            _every(worker_want),
            _every(worker_dial),
            _every(worker_pull),
            ANY_WORKER_REPORTED,
            _every(worker_plan),
            _every(worker_snapshot),
            _every(worker_cancel),
            _every(worker_fetch),
            _every(worker_extend),
            _every(worker_acknowledge),
            _every(worker_prefixes),
            ANY_GATEWAY_REPORTED,
        ),
    ),
    OPERATOR: Permissions(
        publish=(*(status(service) for service in SERVICES), "$SRV.>"),
        subscribe=(f"{inbox_prefix(OPERATOR)}.>", PLACEMENT_WANTED),
        may_answer=False,
    ),
}
"""By NATS user: one for each service, whatever its instances, and the operator. nats-server enforces it."""
