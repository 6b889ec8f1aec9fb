"""The scheduler on the bus: acquires leases and leads one `Term` after another, or is a standby.

There is a lease for each shard of the fleet. A standby receives heartbeats, for the highest epoch, and
answers `status`. No state outlives a term.
"""

import asyncio
from typing import Any

from services.scheduler.cells import merged
from services.scheduler.config import SchedulerConfig
from services.scheduler.core.fair_share import FairShare
from services.scheduler.leader_term import Term
from services.scheduler.policy import find_policy
from shared import metrics, subjects, watchdog
from shared.bus import Bus, Lease, Listener, fenced, recorder_handlers, status_handlers, status_of
from shared.clock import monotonic_s
from shared.errors import NotLeader, PermissionRefused, PolicyFailed, UnavailableError
from shared.log import canonical, get_logger
from shared.messages.base import Empty
from shared.messages.reports import SchedulerPresent, ServiceStatus, WorkerReported
from shared.messages.values import EPOCH_REACH
from shared.plugins import PluginFaults, told
from shared.shards import Shard, shard_of
from shared.tasks import until_first

_log = get_logger("scheduler")
_PRESENT_S = 0.5
"""Interval of heartbeats to the other schedulers."""
_UNHELD_S = 5.0
"""Time without a leader after which a shard is reported."""
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
"""Served at all times; a leader adds those of its terms."""
_PEER_HANDLERS = (
    Listener(subjects.scheduler_present.any, SchedulerPresent, "on_present", sender="scheduler_id"),
)


class SchedulerService:
    """One instance, standby or leader."""

    def __init__(self, config: SchedulerConfig, bus: Bus) -> None:
        self._config = config
        self._bus = bus
        self._make_policy = find_policy(config.policy)
        self._started_s = monotonic_s()
        self._highest_epoch = [0] * config.shards
        """By shard."""
        self._heard: dict[str, tuple[float, int, str]] = {}
        """By worker: time of the last report, incarnation, model."""
        self._terms: dict[int, Term] = {}
        """By shard."""
        self._share = FairShare(config.shards, self._started_s)
        self._held_s = dict.fromkeys(range(config.shards), self._started_s)
        """When each shard had a leader last."""
        self._faults = PluginFaults()
        """Failures of terms."""
        self._account = watchdog.part("lease")
        self._still = metrics.gauge(
            "kvasir_scheduler_standstill_seconds",
            "For so long work has waited and nothing moved; 0: all is well",
        )

    def on_worker_reported(self, report: WorkerReported) -> None:
        shard = shard_of(report.worker_id, self._config.shards)
        self._highest_epoch[shard] = max(self._highest_epoch[shard], report.epoch)
        if len(self._heard) > _MOST_HEARD:
            self._forget_silent()
        self._heard[report.worker_id] = monotonic_s(), report.incarnation, report.model
        self._bus.departures.on_listening(report.worker_id, report.incarnation, report.door)
        if (term := self._terms.get(shard)) is not None:
            term.on_worker_reported(report)

    def on_present(self, event: SchedulerPresent) -> None:
        if event.scheduler_id != self._bus.instance:
            self._share.hear(event, monotonic_s())

    async def status(self, _: Empty) -> ServiceStatus:
        now_s = monotonic_s()
        details: dict[str, Any] = {"role": "standby", "policy": self._config.policy}
        rules = self._config.rules()
        details["rules"] = {
            **{name: getattr(self._config, name) for name in _TOLD},
            **{name: getattr(rules, name) for name in _TOLD_RULES},
            "queue": rules.queue or "",
            "start_tokens": rules.settings.start_tokens,
        }
        if self._terms:
            described = merged([term.describe() for term in self._terms.values()])
            details |= {"role": "leader", **described}
        if self._config.shards > 1:
            holders = self._share.holders(now_s) | dict.fromkeys(self._terms, self._bus.instance)
            details["leads"] = " ".join(map(str, sorted(self._terms))) or "none"
            shards = range(self._config.shards)
            details["shards"] = [{"shard": each, "leader": holders.get(each, "")} for each in shards]
        told = details.get("trouble") or self._faults.text(now_s)
        details["trouble"] = told or self._share.objection(now_s) or self._leaderless(now_s)
        return status_of(self._bus, "scheduler", now_s - self._started_s, details)

    async def serve(self) -> None:
        """Acquire leases and lead, repeatedly, until cancelled."""
        await self._bus.attach(HANDLERS, self)
        await self._bus.attach(recorder_handlers("scheduler"), self._bus.recorder)
        await self._bus.watch_departures(self._on_gone)
        try:
            await self._bus.attach(_PEER_HANDLERS, self)
        except PermissionRefused as error:  # nats-server runs since an earlier release
            _log.warning("other schedulers' shards are not known: %s", error.message)
        shards = [Shard(number, self._config.shards) for number in range(self._config.shards)]
        await until_first(self._meet(), *map(self._stand_for, shards))

    async def _meet(self) -> None:
        """Tell the others which shards this instance leads, and give back those that are too many."""
        me, objection = self._bus, ""
        while True:
            now_s = monotonic_s()
            self._still.set(max((term.standstill_s for term in self._terms.values()), default=0.0))
            for shard in self._share.holders(now_s) | self._terms:
                self._held_s[shard] = now_s
            if objection != (objection := self._share.objection(now_s)) and objection:
                _log.error("%s", objection)
            for shard in self._share.give_back(self._terms.keys(), now_s):
                self._terms[shard].end("given back to other schedulers")
            if self._config.shards > 1 or self._share.present(now_s):
                held, shards = tuple(sorted(self._terms)), self._config.shards
                event = SchedulerPresent(
                    scheduler_id=me.instance, incarnation=me.incarnation, shards=shards, held=held
                )
                with fenced("scheduler heartbeat"):
                    await me.publish(subjects.scheduler_present(me.instance), event)
            await asyncio.sleep(_PRESENT_S)

    def _leaderless(self, now_s: float) -> str:
        shards = [str(shard) for shard, at_s in self._held_s.items() if now_s - at_s > _UNHELD_S]
        is_told = self._config.shards > 1 and shards
        return f"no scheduler leads shard {', '.join(shards)}" if is_told else ""

    def _account_for(self) -> None:
        held = [Shard(number).role for number in sorted(self._terms)]
        self._account.at(f"holds {', '.join(held)}" if held else "waits for scheduler", None)

    async def _stand_for(self, shard: Shard) -> None:
        """Acquire a shard's lease and lead it, repeatedly."""
        failures, ttl_s = 0, self._config.lease_ttl_s
        await asyncio.sleep(0.25 * shard.number / shard.count)  # so that no two are taken at once

        def patience_s() -> float:
            return self._share.patience_s(shard.number, len(self._terms), monotonic_s(), ttl_s)

        while True:
            self._account_for()
            lease = await self._bus.acquire_lease(shard.role, ttl_s=ttl_s, patience_s=patience_s)
            began_s, failure = monotonic_s(), None
            try:
                failure = await self._lead(lease, shard)
            except Exception as error:
                _log.exception("the term ended by an error")
                failure = error
            finally:
                self._terms.pop(shard.number, None)
                await lease.release()
            if failure is not None:
                now_s = monotonic_s()
                self._faults.count(PolicyFailed(f"the scheduler begins anew after {told(failure)}"), now_s)
                failures = failures + 1 if now_s - began_s < _STABLE_S else 1
                await asyncio.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(failures - 1, 10)))

    def _on_gone(self, instance: str, incarnation: int) -> None:
        if self._heard.get(instance, (0.0, 0, ""))[1] <= incarnation:
            self._heard.pop(instance, None)
        self._share.forget(instance, incarnation)
        for term in list(self._terms.values()):
            term.on_gone(instance, incarnation)

    def _forget_silent(self) -> None:
        since_s = monotonic_s() - _LATELY_S
        self._heard = {name: heard for name, heard in self._heard.items() if heard[0] >= since_s}

    async def _lead(self, lease: Lease, shard: Shard) -> Exception | None:
        """Lead one term; return the core's exception if that ended it."""
        most_epoch, highest = lease.epoch + EPOCH_REACH, self._highest_epoch
        if highest[shard.number] > most_epoch:
            _log.warning("a worker claims epoch %d, which no scheduler has had", highest[shard.number])
            highest[shard.number] = 0
        epoch = max(lease.epoch, highest[shard.number] + 1)
        self._forget_silent()
        present = {
            name: (incarnation, model)
            for name, (_, incarnation, model) in self._heard.items()
            if shard.has(name)
        }
        term = Term(self._config, self._bus, self._make_policy, epoch, most_epoch, present, shard)
        self._terms[shard.number] = term
        self._account_for()
        which = {} if shard.count == 1 else {"shard": shard.number}
        canonical(_log, "leading", epoch=epoch, policy=self._config.policy, **which)
        try:
            await until_first(self._keep(lease), term.run())
        finally:
            highest[shard.number] = max(highest[shard.number], term.epoch, term.heard_epoch)
            reason = term.end_reason or "lease lost, or stopping"
            canonical(_log, "standing by", epoch=term.epoch, reason=reason, **which)
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
