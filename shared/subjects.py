"""All subjects on the bus and the permissions to use them. No other module builds a subject.

`kvasir.v1.cmd.<service>.<verb>[.<id>[.<sender>]]`, `kvasir.v1.evt.<service>.<past participle>[.<sender>]` and
`kvasir.v1.tok.<gateway id>.<worker id>`.
Ids come from the operator and are checked here; subjects never contain client input. Every instance is a NATS
user of its own. If a message names its sender, the subject ends in that name. The server lets no other user
publish there, and the receiver compares the two (`sender` of a handler).
"""

import re
from dataclasses import dataclass

PREFIX = "kvasir.v1"
_INBOX = "_INBOX_"
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

SERVICES = ("gateway", "scheduler", "predictor", "placement", "ledger", "worker")
OPERATOR = "operator"
"""User that queries every service's status: the supervisor, `services status`, `nats micro ls`."""

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
"""Faults of the stack, published by its supervisor."""
SCHEDULER_PREPARED = f"{PREFIX}.evt.scheduler.prepared"
"""A migration target is ready; the gateway may switch the sequence to it."""
SCHEDULER_MOVED = f"{PREFIX}.evt.scheduler.moved"
"""A migration ended, successfully or not."""
PLACEMENT_WANTED = f"{PREFIX}.evt.placement.wanted"
"""Desired number of workers, and workers that may stop."""
PLACEMENT_ROLES = f"{PREFIX}.evt.placement.roles"
"""Roles of workers: prefill, decode or both."""
GATEWAY_FINISHED = f"{PREFIX}.evt.gateway.finished"
ANY_GATEWAY_REPORTED = f"{PREFIX}.evt.gateway.reported.*"
ANY_WORKER_REPORTED = f"{PREFIX}.evt.worker.reported.*"
ANY_WORKER_STEPPED = f"{PREFIX}.evt.worker.stepped.*"
ANY_WORKER_CACHED = f"{PREFIX}.evt.worker.cached.*"
ANY_WORKER_OBSERVED = f"{PREFIX}.evt.worker.observed.*"
ANY_PREDICTOR_REVISED = f"{PREFIX}.evt.predictor.revised.*"
BUS_CONNECTED = f"{PREFIX}.evt.bus.connected"
BUS_DISCONNECTED = f"{PREFIX}.evt.bus.disconnected"
"""Sent by nats-server, in JSON: a connection began or ended."""
LEDGER_OFFERED = f"{PREFIX}.evt.ledger.offered"
LEDGER_ANNOUNCED = f"{PREFIX}.evt.ledger.announced"

LEASE_BUCKET = "kvasir_leases"
"""JetStream key-value bucket; maps each role to its holder."""


def checked_id(value: str) -> str:
    """Return `value` if it is a valid subject token. Raise ValueError naming the rule otherwise."""
    if not _ID.fullmatch(value):
        raise ValueError(f"{value!r} is no instance id: 1 to 64 of A-Z a-z 0-9 _ -")
    return value


def service_of(user: str) -> str:
    """Return the service of an instance: `worker` for `worker-0`. Raise ValueError naming the rule."""
    service, _, rest = checked_id(user).partition("-")
    if service not in SERVICES or not rest:
        raise ValueError(f"{user!r} is no instance: SERVICE-ID, with one of {', '.join(SERVICES)}")
    return service


@dataclass(frozen=True)
class Named:
    """Subjects that end in an instance's name: `<stem>.<instance>`."""

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
        """Subject that the receiver subscribes to."""
        return f"{self.stem}.{checked_id(receiver)}.*"

    def by(self, sender: str) -> str:
        """Subject that the sender may publish to."""
        return f"{self.stem}.*.{checked_id(sender)}"


tokens = Signed(f"{PREFIX}.tok")
"""Worker → gateway: token frames."""
worker_dial = Signed(f"{PREFIX}.cmd.worker.dial")
"""Worker → worker: a bulk-plane connection is about to be opened to the receiver."""
worker_borrow = Signed(f"{PREFIX}.cmd.worker.borrow")
"""Debtor → creditor: borrow KV blocks."""
worker_renew = Signed(f"{PREFIX}.cmd.worker.renew")
"""Debtor → creditor: renew leases."""
worker_repay = Signed(f"{PREFIX}.cmd.worker.repay")
"""Debtor → creditor: return blocks."""
worker_cancel = Signed(f"{PREFIX}.cmd.worker.cancel")
"""From the sequence's gateway or a scheduler; likewise `worker_fetch`."""
worker_fetch = Signed(f"{PREFIX}.cmd.worker.fetch")
worker_extend = Signed(f"{PREFIX}.cmd.worker.extend")
"""Gateway → migration target: tokens computed by the source since."""
worker_acknowledge = Signed(f"{PREFIX}.cmd.worker.acknowledge")
worker_forget = Signed(f"{PREFIX}.cmd.worker.forget")
"""Gateway → worker, for the operator: empty the prefix cache."""

gateway_shadow = Signed(f"{PREFIX}.cmd.gateway.shadow")
"""From a gateway to the one that would take over its answers."""
gateway_claim = Signed(f"{PREFIX}.cmd.gateway.claim")
"""From a gateway whose client asks for an answer that another gateway may hold."""

scheduler_submit = Named(f"{PREFIX}.cmd.scheduler.submit")
"""Sent by that gateway."""
scheduler_cancel = Named(f"{PREFIX}.cmd.scheduler.cancel")
"""Sent by that gateway."""
ledger_candidates = Named(f"{PREFIX}.cmd.ledger.candidates")
"""Sent by that worker."""
worker_plan = Named(f"{PREFIX}.cmd.worker.plan")
worker_snapshot = Named(f"{PREFIX}.cmd.worker.snapshot")
worker_prefixes = Named(f"{PREFIX}.cmd.worker.prefixes")
worker_want = Named(f"{PREFIX}.cmd.worker.want")
"""Scheduler → worker: a waiting sequence needs more KV than the worker has."""
worker_pull = Named(f"{PREFIX}.cmd.worker.pull")
"""Scheduler → migration target: fetch blocks from the source."""
worker_settle = Named(f"{PREFIX}.cmd.worker.settle")
"""Ledger → worker in a cycle of debts."""
worker_reported = Named(f"{PREFIX}.evt.worker.reported")
worker_stepped = Named(f"{PREFIX}.evt.worker.stepped")
worker_cached = Named(f"{PREFIX}.evt.worker.cached")
"""Changes of its prefix cache."""
worker_observed = Named(f"{PREFIX}.evt.worker.observed")
"""Hidden states of running sequences."""
predictor_revised = Named(f"{PREFIX}.evt.predictor.revised")
"""Revised length predictions of those sequences."""
gateway_reported = Named(f"{PREFIX}.evt.gateway.reported")


def status(service: str) -> str:
    """Return the subject on which every instance of the service replies."""
    return f"{PREFIX}.cmd.{checked_id(service)}.status"


def instance_status(service: str, instance: str) -> str:
    """Return the subject on which that instance replies to the operator and to its own health check."""
    return f"{status(service)}.{checked_id(instance)}"


def recorded(service: str, instance: str) -> str:
    """Return the subject on which that instance returns its recorded events (`shared.recorder`) to the
    operator and to gateways."""
    return f"{PREFIX}.cmd.{checked_id(service)}.recorded.{checked_id(instance)}"


_SEEN = tuple(
    f"{PREFIX}.cmd.{service}.{verb}" for service in SERVICES for verb in ("status", "status.*", "recorded.*")
)
"""Queries of the live page and of `services explain`."""


def inbox_prefix(user: str) -> str:
    """Return the prefix of a user's reply subjects; no other user may subscribe there."""
    return f"{_INBOX}{checked_id(user)}"


def is_inbox(subject: str) -> bool:
    """Return True for a reply subject. nats-py reports refused subjects in lower case."""
    return subject.upper().startswith(_INBOX)


def micro_name(service: str) -> str:
    """Return the service's name in NATS micro discovery."""
    return f"kvasir-{checked_id(service)}"


@dataclass(frozen=True)
class Permissions:
    """Permissions of one NATS user, as patterns with NATS wildcards; everything else is refused."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    may_answer: bool = True
    """True to allow one reply to each received message, and to no other inbox."""


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
    """Return the permissions of an instance such as `worker-0`, or of the operator. Raise ValueError for any
    other name."""
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
