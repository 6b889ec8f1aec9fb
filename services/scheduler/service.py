"""The scheduler on the bus: acquires the lease and leads one `Term` after another, or is a standby.

A standby receives heartbeats, for the highest epoch, and answers `status`. No state outlives a term.
"""

import asyncio
from typing import Any

from services.scheduler.config import SchedulerConfig
from services.scheduler.leader_term import HANDLERS as TERM_HANDLERS
from services.scheduler.leader_term import Term
from services.scheduler.policy import find_policy
from shared import subjects, watchdog
from shared.bus import Bus, Lease, Listener, recorder_handlers, status_handlers, status_of
from shared.clock import monotonic_s
from shared.errors import NotLeader, PolicyFailed, UnavailableError
from shared.log import canonical, get_logger
from shared.messages.base import Empty
from shared.messages.reports import ServiceStatus, WorkerReported
from shared.messages.values import EPOCH_REACH
from shared.plugins import PluginFaults, told

_log = get_logger("scheduler")
_ROLE = "scheduler"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _STABLE_S = 0.5, 10.0, 10.0
"""Pauses after a failed term; they double unless the term lasted `_STABLE_S`."""
_LATELY_S = 2.0
"""A new term waits only for workers that reported within this time."""
_MOST_HEARD = 4096
"""Number of workers after which silent ones are removed."""
_TOLD = ("policy", "policy_options", "chunked_prefill", "max_batch_sequences", "token_budget", "max_steps")
_TOLD_RULES = ("feed_sequences", "outstanding_steps", "ahead_s")
"""Settings and constants of batching that `status` reports, for replays of a recording."""

HANDLERS = (
    *status_handlers("scheduler"),
    Listener(subjects.ANY_WORKER_REPORTED, WorkerReported, "on_worker_reported", sender="worker_id"),
)
"""Served at all times; a leader adds `leader_term.HANDLERS`."""


class SchedulerService:
    """One instance, standby or leader."""

    def __init__(self, config: SchedulerConfig, bus: Bus) -> None:
        self._config = config
        self._bus = bus
        self._make_policy = find_policy(config.policy)
        self._started_s = monotonic_s()
        self._highest_epoch = 0
        self._heard: dict[str, tuple[float, int, str]] = {}
        """By worker: time of the last report, incarnation, model."""
        self._term: Term | None = None
        self._faults = PluginFaults()
        """Failures of terms."""
        self._account = watchdog.part("lease")

    def on_worker_reported(self, report: WorkerReported) -> None:
        self._highest_epoch = max(self._highest_epoch, report.epoch)
        if len(self._heard) > _MOST_HEARD:
            self._forget_silent()
        self._heard[report.worker_id] = monotonic_s(), report.incarnation, report.model
        self._bus.departures.on_listening(report.worker_id, report.incarnation, report.door)
        if self._term is not None:
            self._term.on_worker_reported(report)

    async def status(self, _: Empty) -> ServiceStatus:
        term = self._term
        details: dict[str, Any] = {"role": "standby", "policy": self._config.policy}
        rules = self._config.rules()
        details["rules"] = {
            **{name: getattr(self._config, name) for name in _TOLD},
            **{name: getattr(rules, name) for name in _TOLD_RULES},
            "queue": rules.queue or "",
            "start_tokens": rules.settings.start_tokens,
        }
        if term is not None:
            details |= {"role": "leader", **term.describe()}
        details["trouble"] = details.get("trouble") or self._faults.text(monotonic_s())
        return status_of(self._bus, "scheduler", monotonic_s() - self._started_s, details)

    async def serve(self) -> None:
        """Acquire the lease and lead, repeatedly, until cancelled."""
        await self._bus.attach(HANDLERS, self)
        await self._bus.attach(recorder_handlers("scheduler"), self._bus.recorder)
        await self._bus.watch_departures(self._on_gone)
        failures = 0
        while True:
            self._account.at(f"waits for {_ROLE}", None)
            lease = await self._bus.acquire_lease(_ROLE, ttl_s=self._config.lease_ttl_s)
            self._account.at(f"holds {_ROLE}", None)
            began_s, failure = monotonic_s(), None
            try:
                failure = await self._lead(lease)
            except Exception as error:
                _log.exception("the term ended by an error")
                failure = error
            finally:
                self._term = None
                await lease.release()
            if failure is not None:
                now_s = monotonic_s()
                self._faults.count(PolicyFailed(f"the scheduler begins anew after {told(failure)}"), now_s)
                failures = failures + 1 if now_s - began_s < _STABLE_S else 1
                await asyncio.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(failures - 1, 10)))

    def _on_gone(self, instance: str, incarnation: int) -> None:
        if self._heard.get(instance, (0.0, 0, ""))[1] <= incarnation:
            self._heard.pop(instance, None)
        if self._term is not None:
            self._term.on_gone(instance, incarnation)

    def _forget_silent(self) -> None:
        since_s = monotonic_s() - _LATELY_S
        self._heard = {name: heard for name, heard in self._heard.items() if heard[0] >= since_s}

    async def _lead(self, lease: Lease) -> Exception | None:
        """Lead one term; return the core's exception if that ended it."""
        most_epoch = lease.epoch + EPOCH_REACH
        if self._highest_epoch > most_epoch:
            _log.warning("a worker claims epoch %d, which no scheduler has had", self._highest_epoch)
            self._highest_epoch = 0
        epoch = max(lease.epoch, self._highest_epoch + 1)
        self._forget_silent()
        present = {name: (incarnation, model) for name, (_, incarnation, model) in self._heard.items()}
        term = self._term = Term(self._config, self._bus, self._make_policy, epoch, most_epoch, present)
        canonical(_log, "leading", epoch=epoch, policy=self._config.policy)
        tasks = [asyncio.create_task(term.run()), asyncio.create_task(self._keep(lease))]
        try:
            await self._bus.attach(TERM_HANDLERS, term)
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._bus.detach(TERM_HANDLERS, term)
            self._highest_epoch = max(self._highest_epoch, term.epoch, term.heard_epoch)
            reason = term.end_reason or "lease lost, or stopping"
            canonical(_log, "standing by", epoch=term.epoch, reason=reason)
        return term.failure

    async def _keep(self, lease: Lease) -> None:
        """Renew the lease until it is taken, or until renewals fail for its whole time to live."""
        renewed_s = monotonic_s()
        while True:
            await asyncio.sleep(self._config.lease_ttl_s / 4)
            asked_s = monotonic_s()
            try:
                await lease.renew()
                renewed_s = asked_s
            except NotLeader as error:
                _log.warning("%s", error)
                return
            except UnavailableError as error:
                _log.warning("the lease was not renewed: %s", error)
                if monotonic_s() - renewed_s > self._config.lease_ttl_s + lease.patience_s:
                    return


async def run(config: SchedulerConfig) -> None:
    """Connect and serve until cancelled. Raises BusUnavailable."""
    bus = await Bus.connect(config.bus, service="scheduler", instance=config.instance)
    try:
        await SchedulerService(config, bus).serve()
    finally:
        await bus.close()
