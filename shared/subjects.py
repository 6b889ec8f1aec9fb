"""Every subject on the bus, and the only place where one is built.

`kvasir.v1.cmd.<service>.<verb>[.<id>]`, `kvasir.v1.evt.<service>.<past participle>[.<id>]` and
`kvasir.v1.tok.<gateway id>`.
Ids are configured by the operator and checked here; no string that a client sent ever enters a subject.
"""

import re

PREFIX = "kvasir.v1"
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

SERVICES = ("gateway", "scheduler", "predictor", "placement", "ledger", "worker")

SCHEDULER_SUBMIT = f"{PREFIX}.cmd.scheduler.submit"
SCHEDULER_CANCEL = f"{PREFIX}.cmd.scheduler.cancel"
PREDICTOR_PREDICT = f"{PREFIX}.cmd.predictor.predict"
PLACEMENT_PLACE = f"{PREFIX}.cmd.placement.place"
LEDGER_CANDIDATES = f"{PREFIX}.cmd.ledger.candidates"

SCHEDULER_ANNOUNCED = f"{PREFIX}.evt.scheduler.announced"
SCHEDULER_WORKER_LOST = f"{PREFIX}.evt.scheduler.lost"
GATEWAY_FINISHED = f"{PREFIX}.evt.gateway.finished"
ANY_GATEWAY_REPORTED = f"{PREFIX}.evt.gateway.reported.*"
ANY_WORKER_REPORTED = f"{PREFIX}.evt.worker.reported.*"
ANY_WORKER_STEPPED = f"{PREFIX}.evt.worker.stepped.*"

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


def worker_acknowledge(worker_id: str) -> str:
    return f"{PREFIX}.cmd.worker.acknowledge.{checked_id(worker_id)}"


def worker_reported(worker_id: str) -> str:
    return f"{PREFIX}.evt.worker.reported.{checked_id(worker_id)}"


def worker_stepped(worker_id: str) -> str:
    return f"{PREFIX}.evt.worker.stepped.{checked_id(worker_id)}"


def gateway_reported(gateway_id: str) -> str:
    return f"{PREFIX}.evt.gateway.reported.{checked_id(gateway_id)}"


def tokens(gateway_id: str) -> str:
    return f"{PREFIX}.tok.{checked_id(gateway_id)}"
