"""Every subject on the bus, the only place where one is built, and who may use which.

`kvasir.v1.cmd.<service>.<verb>[.<id>[.<sender>]]`, `kvasir.v1.evt.<service>.<past participle>[.<sender>]` and
`kvasir.v1.tok.<gateway id>.<worker id>`.
Ids are configured by the operator and checked here; no string that a client sent ever enters a subject.
Every instance is a NATS user of its own. Where a message says who sends it, the subject ends in that name:
the server lets nobody else publish there, and the receiver compares the two (`sender` of a handler).
"""

import re
from dataclasses import dataclass

PREFIX = "kvasir.v1"
_INBOX = "_INBOX_"
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

SERVICES = ("gateway", "scheduler", "predictor", "placement", "ledger", "worker")
OPERATOR = "operator"
"""Who asks every service for its status: the supervisor, `services status`, `nats micro ls`."""

ANY_SCHEDULER_SUBMIT = f"{PREFIX}.cmd.scheduler.submit.*"
ANY_SCHEDULER_CANCEL = f"{PREFIX}.cmd.scheduler.cancel.*"
SCHEDULER_MOVE = f"{PREFIX}.cmd.scheduler.move"
PREDICTOR_PREDICT = f"{PREFIX}.cmd.predictor.predict"
PLACEMENT_PLACE = f"{PREFIX}.cmd.placement.place"
ANY_LEDGER_CANDIDATES = f"{PREFIX}.cmd.ledger.candidates.*"

SCHEDULER_ANNOUNCED = f"{PREFIX}.evt.scheduler.announced"
SCHEDULER_WORKER_LOST = f"{PREFIX}.evt.scheduler.lost"
SCHEDULER_ABANDONED = f"{PREFIX}.evt.scheduler.abandoned"
STACK_VERDICT = f"{PREFIX}.evt.stack.verdict"
"""What is wrong with the stack, as its supervisor sees it."""
SCHEDULER_PREPARED = f"{PREFIX}.evt.scheduler.prepared"
"""Another worker is ready for a sequence: its gateway may hand it over."""
SCHEDULER_MOVED = f"{PREFIX}.evt.scheduler.moved"
"""A migration is over, whichever way."""
PLACEMENT_WANTED = f"{PREFIX}.evt.placement.wanted"
"""How many workers should run, and which need not."""
PLACEMENT_ROLES = f"{PREFIX}.evt.placement.roles"
"""Which workers compute prompts, which write answers."""
GATEWAY_FINISHED = f"{PREFIX}.evt.gateway.finished"
ANY_GATEWAY_REPORTED = f"{PREFIX}.evt.gateway.reported.*"
ANY_WORKER_REPORTED = f"{PREFIX}.evt.worker.reported.*"
ANY_WORKER_STEPPED = f"{PREFIX}.evt.worker.stepped.*"
ANY_WORKER_CACHED = f"{PREFIX}.evt.worker.cached.*"
ANY_WORKER_OBSERVED = f"{PREFIX}.evt.worker.observed.*"
ANY_PREDICTOR_REVISED = f"{PREFIX}.evt.predictor.revised.*"
BUS_CONNECTED = f"{PREFIX}.evt.bus.connected"
BUS_DISCONNECTED = f"{PREFIX}.evt.bus.disconnected"
"""From nats-server, in JSON: a connection has begun, or ended."""
LEDGER_OFFERED = f"{PREFIX}.evt.ledger.offered"
LEDGER_ANNOUNCED = f"{PREFIX}.evt.ledger.announced"

LEASE_BUCKET = "kvasir_leases"
"""JetStream key-value bucket; the key is the name of the role, the value its holder."""


def checked_id(value: str) -> str:
    """`value` when it can be one token of a subject. Raises ValueError naming the rule otherwise."""
    if not _ID.fullmatch(value):
        raise ValueError(f"{value!r} is no instance id: 1 to 64 of A-Z a-z 0-9 _ -")
    return value


def service_of(user: str) -> str:
    """Whose instance it is: `worker` of `worker-0`. Raises ValueError naming the rule."""
    service, _, rest = checked_id(user).partition("-")
    if service not in SERVICES or not rest:
        raise ValueError(f"{user!r} is no instance: SERVICE-ID, with one of {', '.join(SERVICES)}")
    return service


@dataclass(frozen=True)
class Named:
    """Subjects that end in the name of one instance: `<stem>.<instance>`."""

    stem: str

    def __call__(self, instance: str) -> str:
        return f"{self.stem}.{checked_id(instance)}"


@dataclass(frozen=True)
class Signed:
    """Subjects from one instance to another: `<stem>.<receiver>.<sender>`."""

    stem: str

    def __call__(self, receiver: str, sender: str) -> str:
        return f"{self.stem}.{checked_id(receiver)}.{checked_id(sender)}"

    def to(self, receiver: str) -> str:
        """What the receiver subscribes to."""
        return f"{self.stem}.{checked_id(receiver)}.*"

    def by(self, sender: str) -> str:
        """What the sender may publish."""
        return f"{self.stem}.*.{checked_id(sender)}"


tokens = Signed(f"{PREFIX}.tok")
"""From a worker to a gateway."""
worker_dial = Signed(f"{PREFIX}.cmd.worker.dial")
"""To a worker that is about to be dialled on the bulk plane, from who will dial."""
worker_borrow = Signed(f"{PREFIX}.cmd.worker.borrow")
"""To the creditor, from a worker that is short of KV."""
worker_renew = Signed(f"{PREFIX}.cmd.worker.renew")
"""To the creditor, from its debtor."""
worker_repay = Signed(f"{PREFIX}.cmd.worker.repay")
"""To the creditor, from its debtor."""
worker_cancel = Signed(f"{PREFIX}.cmd.worker.cancel")
"""From a sequence's gateway, or from a scheduler; so is what follows."""
worker_fetch = Signed(f"{PREFIX}.cmd.worker.fetch")
worker_extend = Signed(f"{PREFIX}.cmd.worker.extend")
"""To the worker that takes a sequence over, from its gateway."""
worker_acknowledge = Signed(f"{PREFIX}.cmd.worker.acknowledge")
worker_forget = Signed(f"{PREFIX}.cmd.worker.forget")
"""To a worker that is to empty its prefix cache, from a gateway, for its operator."""

gateway_shadow = Signed(f"{PREFIX}.cmd.gateway.shadow")
"""From a gateway to the one that would take its answers over."""
gateway_claim = Signed(f"{PREFIX}.cmd.gateway.claim")
"""From a gateway whose client asks for an answer that another may have."""

scheduler_submit = Named(f"{PREFIX}.cmd.scheduler.submit")
"""From that gateway."""
scheduler_cancel = Named(f"{PREFIX}.cmd.scheduler.cancel")
"""From that gateway."""
ledger_candidates = Named(f"{PREFIX}.cmd.ledger.candidates")
"""From that worker."""
worker_plan = Named(f"{PREFIX}.cmd.worker.plan")
worker_snapshot = Named(f"{PREFIX}.cmd.worker.snapshot")
worker_prefixes = Named(f"{PREFIX}.cmd.worker.prefixes")
worker_want = Named(f"{PREFIX}.cmd.worker.want")
"""From the scheduler: a sequence waits there that needs more KV than the worker has."""
worker_pull = Named(f"{PREFIX}.cmd.worker.pull")
"""To the target of a migration: fetch blocks from its source."""
worker_settle = Named(f"{PREFIX}.cmd.worker.settle")
"""To a worker in a cycle of debts, from the ledger."""
worker_reported = Named(f"{PREFIX}.evt.worker.reported")
worker_stepped = Named(f"{PREFIX}.evt.worker.stepped")
worker_cached = Named(f"{PREFIX}.evt.worker.cached")
"""What came into its prefix cache and what left it."""
worker_observed = Named(f"{PREFIX}.evt.worker.observed")
"""Hidden states of answers under way."""
predictor_revised = Named(f"{PREFIX}.evt.predictor.revised")
"""How long such answers will become."""
gateway_reported = Named(f"{PREFIX}.evt.gateway.reported")


def status(service: str) -> str:
    """Scatter-gather: every instance of the service answers."""
    return f"{PREFIX}.cmd.{checked_id(service)}.status"


def instance_status(service: str, instance: str) -> str:
    """That instance answers; it may ask, for its own health check, and the operator."""
    return f"{status(service)}.{checked_id(instance)}"


def recorded(service: str, instance: str) -> str:
    """That instance says what it remembers of the last while (`shared.recorder`), to the operator and to
    gateways."""
    return f"{PREFIX}.cmd.{checked_id(service)}.recorded.{checked_id(instance)}"


_SEEN = tuple(
    f"{PREFIX}.cmd.{service}.{verb}" for service in SERVICES for verb in ("status", "status.*", "recorded.*")
)
"""What the live page and `services explain` ask."""


def inbox_prefix(user: str) -> str:
    """Where the answers to a user's own questions arrive; nobody else may listen there."""
    return f"{_INBOX}{checked_id(user)}"


def is_inbox(subject: str) -> bool:
    """Whether answers arrive there. nats-py tells of refused subjects in small letters."""
    return subject.upper().startswith(_INBOX)


def micro_name(service: str) -> str:
    """The service's name in NATS micro discovery."""
    return f"kvasir-{checked_id(service)}"


@dataclass(frozen=True)
class Permissions:
    """What one NATS user may do, as patterns with the wildcards of NATS; all else is refused."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    may_answer: bool = True
    """Once, to the reply subject of each message that reaches it, and to no other inbox."""


_LEASE_STREAM = f"KV_{LEASE_BUCKET}"
_LEASE_PUBLISH = (
    f"$JS.API.STREAM.INFO.{_LEASE_STREAM}",
    f"$JS.API.STREAM.CREATE.{_LEASE_STREAM}",
    f"$JS.API.STREAM.MSG.GET.{_LEASE_STREAM}",
    f"$KV.{LEASE_BUCKET}.scheduler",
)


def _to_any_worker(*verbs: str) -> tuple[str, ...]:
    return tuple(f"{PREFIX}.cmd.worker.{verb}.*" for verb in verbs)


def _gateway(me: str) -> Permissions:
    return Permissions(
        publish=(
            scheduler_submit(me),
            scheduler_cancel(me),
            worker_cancel.by(me),
            worker_fetch.by(me),
            worker_extend.by(me),
            worker_acknowledge.by(me),
            worker_forget.by(me),
            gateway_reported(me),
            GATEWAY_FINISHED,
            gateway_shadow.by(me),
            gateway_claim.by(me),
            *_SEEN,
        ),
        subscribe=(
            tokens.to(me),
            gateway_shadow.to(me),
            gateway_claim.to(me),
            ANY_GATEWAY_REPORTED,
            BUS_CONNECTED,
            BUS_DISCONNECTED,
            ANY_WORKER_REPORTED,
            SCHEDULER_ANNOUNCED,
            SCHEDULER_WORKER_LOST,
            SCHEDULER_ABANDONED,
            SCHEDULER_PREPARED,
            STACK_VERDICT,
        ),
    )


def _scheduler(me: str) -> Permissions:
    return Permissions(
        publish=(
            PREDICTOR_PREDICT,
            PLACEMENT_PLACE,
            *_to_any_worker("plan", "snapshot", "want", "pull"),
            worker_cancel.by(me),
            worker_fetch.by(me),
            SCHEDULER_ANNOUNCED,
            SCHEDULER_WORKER_LOST,
            SCHEDULER_ABANDONED,
            SCHEDULER_PREPARED,
            SCHEDULER_MOVED,
            *_LEASE_PUBLISH,
        ),
        subscribe=(
            ANY_SCHEDULER_SUBMIT,
            ANY_SCHEDULER_CANCEL,
            SCHEDULER_MOVE,
            ANY_WORKER_REPORTED,
            ANY_WORKER_STEPPED,
            ANY_GATEWAY_REPORTED,
            ANY_PREDICTOR_REVISED,
            PLACEMENT_ROLES,
            BUS_CONNECTED,
            BUS_DISCONNECTED,
        ),
    )


def _predictor(me: str) -> Permissions:
    return Permissions(
        publish=(predictor_revised(me),),
        subscribe=(PREDICTOR_PREDICT, GATEWAY_FINISHED, ANY_WORKER_OBSERVED),
    )


def _placement(_: str) -> Permissions:
    return Permissions(
        publish=(*_to_any_worker("prefixes"), SCHEDULER_MOVE, PLACEMENT_WANTED, PLACEMENT_ROLES),
        subscribe=(
            PLACEMENT_PLACE,
            ANY_WORKER_REPORTED,
            ANY_WORKER_STEPPED,
            ANY_WORKER_CACHED,
            SCHEDULER_MOVED,
            BUS_CONNECTED,
            BUS_DISCONNECTED,
        ),
    )


def _ledger(_: str) -> Permissions:
    return Permissions(
        publish=(LEDGER_OFFERED, LEDGER_ANNOUNCED, *_to_any_worker("settle")),
        subscribe=(ANY_LEDGER_CANDIDATES, ANY_WORKER_REPORTED, LEDGER_OFFERED, LEDGER_ANNOUNCED),
    )


def _worker(me: str) -> Permissions:
    return Permissions(
        publish=(
            tokens.by(me),
            worker_reported(me),
            worker_stepped(me),
            worker_cached(me),
            worker_observed(me),
            ledger_candidates(me),
            worker_borrow.by(me),
            worker_renew.by(me),
            worker_repay.by(me),
            worker_dial.by(me),
        ),
        subscribe=(
            worker_borrow.to(me),
            worker_renew.to(me),
            worker_repay.to(me),
            worker_dial.to(me),
            worker_cancel.to(me),
            worker_fetch.to(me),
            worker_extend.to(me),
            worker_acknowledge.to(me),
            worker_forget.to(me),
            worker_settle(me),
            worker_want(me),
            worker_pull(me),
            worker_plan(me),
            worker_snapshot(me),
            worker_prefixes(me),
            ANY_WORKER_REPORTED,
            ANY_GATEWAY_REPORTED,
        ),
    )


_TABLE = {
    "gateway": _gateway,
    "scheduler": _scheduler,
    "predictor": _predictor,
    "placement": _placement,
    "ledger": _ledger,
    "worker": _worker,
}


def permissions_of(user: str) -> Permissions:
    """What nats-server enforces: for an instance, such as `worker-0`, or the operator. Raises ValueError for
    a name that is neither."""
    if user == OPERATOR:
        return Permissions(
            publish=(
                *_SEEN,
                "$SRV.>",
                STACK_VERDICT,
            ),
            subscribe=(f"{inbox_prefix(OPERATOR)}.>", PLACEMENT_WANTED),
            may_answer=False,
        )
    service = service_of(user)
    special = _TABLE[service](user)
    found = tuple(
        f"$SRV.{verb}{whom}"
        for verb in ("PING", "INFO", "STATS")
        for whom in ("", f".{micro_name(service)}", f".{micro_name(service)}.*")
    )
    health = instance_status(service, user)
    everybodys = (status(service), health, recorded(service, user), f"{inbox_prefix(user)}.>", *found)
    return Permissions((*special.publish, health), (*special.subscribe, *everybodys))
