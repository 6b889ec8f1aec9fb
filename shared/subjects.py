"""All subjects on the bus and the permissions to use them. No other module builds a subject.

`kvasir.v1.cmd.<service>.<verb>[.<id>[.<sender>]]`, `kvasir.v1.evt.<service>.<past participle>[.<sender>]` and
`kvasir.v1.tok.<gateway id>.<worker id>`.
Each is declared once, with the services that publish and subscribe to it; `permissions_of` follows from that.
Ids come from the operator and are checked here; subjects never contain client input. Every instance is a NATS
user of its own. If a message names its sender, the subject ends in that name. The server lets no other user
publish there, and the receiver compares the two (`sender` of a handler).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

PREFIX = "kvasir.v1"
_INBOX = "_INBOX_"
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

SERVICES = ("gateway", "scheduler", "predictor", "placement", "ledger", "worker")
OPERATOR = "operator"
"""User that queries every service's status: the supervisor, `services status`, `nats micro ls`."""


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

    @property
    def any(self) -> str:
        """Pattern for those of all instances."""
        return f"{self.stem}.*"


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


_Pattern = Callable[[str], str]
"""Pattern that a user may use, with its name."""
_PUBLISHERS: list[tuple[str, _Pattern]] = []
_SUBSCRIBERS: list[tuple[str, _Pattern]] = []
"""Each service (or the operator) with a pattern that its instances may publish or subscribe to."""


def _allow(by: str, publish: _Pattern, to: str, subscribe: _Pattern) -> None:
    """Let the services in `by` publish, and those in `to` subscribe."""
    _PUBLISHERS.extend((service, publish) for service in by.split())
    _SUBSCRIBERS.extend((service, subscribe) for service in to.split())


def _plain(name: str, by: str, to: str) -> str:
    subject = f"{PREFIX}.{name}"
    _allow(by, lambda me: subject, to, lambda me: subject)
    return subject


def _sent_by(name: str, by: str, to: str) -> Named:
    """Subjects named after their sender."""
    named = Named(f"{PREFIX}.{name}")
    _allow(by, named, to, lambda me: named.any)
    return named


def _sent_to(name: str, by: str, to: str) -> Named:
    """Subjects named after their receiver."""
    named = Named(f"{PREFIX}.{name}")
    _allow(by, lambda me: named.any, to, named)
    return named


def _signed(name: str, by: str, to: str) -> Signed:
    signed = Signed(f"{PREFIX}.{name}")
    _allow(by, signed.by, to, signed.to)
    return signed


SCHEDULER_MOVE = _plain("cmd.scheduler.move", by="placement", to="scheduler")
PREDICTOR_PREDICT = _plain("cmd.predictor.predict", by="scheduler", to="predictor")
PLACEMENT_PLACE = _plain("cmd.placement.place", by="scheduler", to="placement")

SCHEDULER_ANNOUNCED = _plain("evt.scheduler.announced", by="scheduler", to="gateway scheduler")
SCHEDULER_WORKER_LOST = _plain("evt.scheduler.lost", by="scheduler", to="gateway")
SCHEDULER_ABANDONED = _plain("evt.scheduler.abandoned", by="scheduler", to="gateway")
STACK_VERDICT = _plain("evt.stack.verdict", by=OPERATOR, to="gateway")
"""Faults of the stack, published by its supervisor."""
SCHEDULER_PREPARED = _plain("evt.scheduler.prepared", by="scheduler", to="gateway")
"""A migration target is ready; the gateway may switch the sequence to it."""
SCHEDULER_MOVED = _plain("evt.scheduler.moved", by="scheduler", to="placement")
"""A migration ended, successfully or not."""
PLACEMENT_WANTED = _plain("evt.placement.wanted", by="placement", to=OPERATOR)
"""Desired number of workers, and workers that may stop."""
PLACEMENT_ROLES = _plain("evt.placement.roles", by="placement", to="scheduler")
"""Roles of workers: prefill, decode or both."""
GATEWAY_FINISHED = _plain("evt.gateway.finished", by="gateway", to="predictor")
BUS_CONNECTED = _plain("evt.bus.connected", by="", to="gateway scheduler placement")
BUS_DISCONNECTED = _plain("evt.bus.disconnected", by="", to="gateway scheduler placement")
"""Sent by nats-server, in JSON: a connection began or ended."""
LEDGER_OFFERED = _plain("evt.ledger.offered", by="ledger", to="ledger")
LEDGER_ANNOUNCED = _plain("evt.ledger.announced", by="ledger", to="ledger")

LEASE_BUCKET = "kvasir_leases"
"""JetStream key-value bucket; maps each role to its holder."""
_LEASE_SUBJECTS = (
    *(
        f"$JS.API.STREAM.{verb}.KV_{LEASE_BUCKET}"
        for verb in ("INFO", "CREATE", "MSG.GET", "LEADER.STEPDOWN")
    ),
    f"$KV.{LEASE_BUCKET}.scheduler",
    f"$KV.{LEASE_BUCKET}.scheduler.*",
)
"""A scheduler may publish to these."""

tokens = _signed("tok", by="worker", to="gateway")
"""Token frames."""
worker_dial = _signed("cmd.worker.dial", by="worker", to="worker")
"""A bulk-plane connection is about to be opened to the receiver."""
worker_borrow = _signed("cmd.worker.borrow", by="worker", to="worker")
"""Debtor → creditor: borrow KV blocks."""
worker_renew = _signed("cmd.worker.renew", by="worker", to="worker")
"""Debtor → creditor: renew leases."""
worker_repay = _signed("cmd.worker.repay", by="worker", to="worker")
"""Debtor → creditor: return blocks."""
worker_cancel = _signed("cmd.worker.cancel", by="gateway scheduler", to="worker")
worker_fetch = _signed("cmd.worker.fetch", by="gateway scheduler", to="worker")
worker_extend = _signed("cmd.worker.extend", by="gateway", to="worker")
"""To a migration target: tokens computed by the source since."""
worker_acknowledge = _signed("cmd.worker.acknowledge", by="gateway", to="worker")
worker_forget = _signed("cmd.worker.forget", by="gateway", to="worker")
"""For the operator: empty the prefix cache."""
gateway_shadow = _signed("cmd.gateway.shadow", by="gateway", to="gateway")
"""To the gateway that would take over the sender's answers."""
gateway_claim = _signed("cmd.gateway.claim", by="gateway", to="gateway")
"""From a gateway whose client asks for an answer that another gateway may hold."""

scheduler_submit = _sent_by("cmd.scheduler.submit", by="gateway", to="scheduler")
scheduler_present = _sent_by("evt.scheduler.present", by="scheduler", to="scheduler")
"""Heartbeat of a scheduler where the fleet has shards."""
scheduler_cancel = _sent_by("cmd.scheduler.cancel", by="gateway", to="scheduler")
ledger_candidates = _sent_by("cmd.ledger.candidates", by="worker", to="ledger")
worker_reported = _sent_by("evt.worker.reported", by="worker", to="gateway scheduler placement ledger worker")
worker_stepped = _sent_by("evt.worker.stepped", by="worker", to="scheduler placement")
worker_cached = _sent_by("evt.worker.cached", by="worker", to="placement")
"""Changes of its prefix cache."""
worker_observed = _sent_by("evt.worker.observed", by="worker", to="predictor")
"""Hidden states of running sequences."""
predictor_revised = _sent_by("evt.predictor.revised", by="predictor", to="scheduler")
"""Revised length predictions of those sequences."""
gateway_reported = _sent_by("evt.gateway.reported", by="gateway", to="gateway scheduler worker")
ANY_SCHEDULER_SUBMIT, ANY_SCHEDULER_CANCEL = scheduler_submit.any, scheduler_cancel.any
ANY_LEDGER_CANDIDATES = ledger_candidates.any
ANY_WORKER_REPORTED, ANY_WORKER_STEPPED = worker_reported.any, worker_stepped.any
ANY_WORKER_CACHED, ANY_WORKER_OBSERVED = worker_cached.any, worker_observed.any
ANY_PREDICTOR_REVISED, ANY_GATEWAY_REPORTED = predictor_revised.any, gateway_reported.any

scheduler_handed = _sent_to("evt.scheduler.handed", by="scheduler", to="gateway")
"""To the gateway whose sequences another shard should take."""
worker_plan = _sent_to("cmd.worker.plan", by="scheduler", to="worker")
worker_snapshot = _sent_to("cmd.worker.snapshot", by="scheduler", to="worker")
worker_prefixes = _sent_to("cmd.worker.prefixes", by="placement", to="worker")
worker_want = _sent_to("cmd.worker.want", by="scheduler", to="worker")
"""A waiting sequence needs more KV than the worker has."""
worker_pull = _sent_to("cmd.worker.pull", by="scheduler", to="worker")
"""To a migration target: fetch blocks from the source."""
worker_settle = _sent_to("cmd.worker.settle", by="ledger", to="worker")
"""To a worker in a cycle of debts."""

_allow(
    "gateway",
    lambda me: f"{scheduler_submit.stem}.*.{me}",
    "scheduler",
    lambda me: f"{scheduler_submit.stem}.*.*",
)
_plain("cmd.scheduler.move.*", by="placement", to="scheduler")


def submit_to(shard: int, gateway: str) -> str:
    """Return the subject on which the gateway submits to a shard."""
    return f"{scheduler_submit.stem}.{shard}.{checked_id(gateway)}" if shard else scheduler_submit(gateway)


def submissions_to(shard: int) -> str:
    """Return the pattern of all gateways' submissions to a shard."""
    return f"{scheduler_submit.stem}.{shard}.*" if shard else ANY_SCHEDULER_SUBMIT


def moves_in(shard: int) -> str:
    """Return the subject of orders for moves between a shard's workers."""
    return f"{SCHEDULER_MOVE}.{shard}" if shard else SCHEDULER_MOVE


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


def permissions_of(user: str) -> Permissions:
    """Return the permissions of an instance such as `worker-0`, or of the operator. Raise ValueError for any
    other name."""
    service = user if user == OPERATOR else service_of(user)
    publish = [pattern(user) for name, pattern in _PUBLISHERS if name == service]
    subscribe = [pattern(user) for name, pattern in _SUBSCRIBERS if name == service]
    subscribe.append(f"{inbox_prefix(user)}.>")
    if service in ("gateway", OPERATOR):
        publish += _SEEN
    if service == "scheduler":
        publish += _LEASE_SUBJECTS
    if user == OPERATOR:
        return Permissions((*publish, "$SRV.>"), tuple(subscribe), may_answer=False)
    subscribe += [
        f"$SRV.{verb}{whom}"
        for verb in ("PING", "INFO", "STATS")
        for whom in ("", f".{micro_name(service)}", f".{micro_name(service)}.*")
    ]
    health = instance_status(service, user)
    return Permissions((*publish, health), (*subscribe, status(service), health, recorded(service, user)))
