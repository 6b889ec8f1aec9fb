"""What always has to hold in a world, and what has to hold when all trouble is over."""

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any, cast
from unittest.mock import patch

import numpy as np

from services.worker.core.steps import StepCore
from services.worker.engine.contract import Row
from services.worker.engine.simulated import token_at
from services.worker.peers.keeping.loans import SlotPlace
from services.worker.peers.lending.core.debts import BlockState, GrantKey
from services.worker.service import Worker
from shared import subjects
from shared.bus.lease import LeaseHolder
from shared.errors import InvalidMessage
from shared.messages.base import decode
from shared.messages.commands import SubmitSequence
from shared.messages.lending import KvTier
from shared.messages.reports import SequenceHandedOver
from shared.messages.sequence import SequenceKey, SequenceRef
from shared.shards import Shard
from tests.simulation.clients import Clients, codec
from tests.simulation.fleet import Fleet, SentBlocks
from tests.simulation.world import Process

ANSWERS_WITHIN_S = 30.0
"""Of virtual time after the last fault every question has its answer."""
QUIET_WITHIN_S = 30.0
"""After the last answer nothing is left of any."""


_LOOK_EVERY = 4
"""Turns of an engine's thread between two looks into its books."""
_SHARDS_EVERY = 50
"""Events between two looks at who has which worker and which sequence."""
_UNRENEWED_S = 16.0
"""Longest time that a scheduler may lead after it renewed its lease."""


class Violation(Exception):
    """Something that has to hold does not."""


class _Counted:
    """A pool, of which so many blocks more than sequences say are held."""

    def __init__(self, pool: Any, lent: list[int]) -> None:
        self._pool, self._lent = pool, lent

    def check_integrity(self, held: list[int]) -> None:
        self._pool.check_integrity([*held, *self._lent])


@dataclass(eq=False)
class _Flight:
    """A step in flight, and its own blocks that it writes to."""

    ticket: Any
    written: set[int]
    flights: "deque[_Flight]"

    def result(self) -> Any:
        self.flights.remove(self)
        return self.ticket.result()


def _flights(engine: Any) -> "deque[_Flight]":
    """Keep the engine's steps in flight from now on."""
    flights: deque[_Flight] = deque()
    submit, size, own = engine.submit, engine.block_tokens, engine.kv_blocks

    def noted(rows: Sequence[Row]) -> _Flight:
        ticket, written = submit(rows), set[int]()
        for row in rows:
            end = row.first_position + len(row.tokens)
            written.update(row.blocks[row.first_position // size : -(-end // size)])
        flights.append(_Flight(ticket, {block for block in written if block < own}, flights))
        return flights[-1]

    engine.submit = noted
    return flights


class Checks:
    """Of one run. `after_event` raises Violation."""

    def __init__(self, fleet: Fleet, clients: Clients) -> None:
        self._fleet, self._clients = fleet, clients
        self._found: list[str] = []
        self._terms = 0
        self._epochs: dict[tuple[int, int], Process] = {}
        """By shard and epoch."""
        self._handed: dict[SequenceKey, SequenceHandedOver] = {}
        """The last hand-over of each sequence."""
        self._submitted: dict[tuple[int, SequenceRef], str] = {}
        """Subject of each attempt, by its gateway's incarnation."""
        self._events = 0
        self._last_worker_epochs: dict[Process, int] = {}
        self._holders: dict[str, tuple[LeaseHolder, float]] = {}
        self._losses = self._last_revision = 0
        """Of each role, and when they showed last that they live."""
        self._renewed_s: dict[tuple[str, str], float] = {}
        """By role and scheduler."""
        self._checked_tokens: dict[tuple[Process, SequenceRef], int] = {}
        """Of each sequence at each worker, so many of its answer."""
        self._vocabulary = codec().vocab_size
        self._lease_ttl_s: float = fleet.shape.settings["scheduler"]["lease_ttl_s"]
        fleet.world.on_unhandled = self._on_unhandled
        fleet.bus.on_put = self._on_put
        fleet.bus.on_route = self._on_route
        self._is_sharded = fleet.shape.settings["scheduler"].get("shards", 1) > 1
        fleet.on_worker = self._watch

    def after_event(self) -> None:
        """Cheap: what an event may have broken."""
        if self._found:
            raise Violation(self._found[0])
        if self._fleet.unforeseen:
            raise Violation(self._fleet.unforeseen[0])
        if len(self._fleet.terms) > self._terms:
            self._check_terms()
        self._events += 1
        if self._events % _SHARDS_EVERY == 0:
            self._check_leases()
        if self._is_sharded and self._events % _SHARDS_EVERY == 0:
            self._check_shards()

    def _watch(self, process: Process, worker: Worker) -> None:
        """Its books are looked into by its engine's thread, between two steps."""
        between, looks = worker._runner._between, count()
        flights = _flights(worker._runner._engine)

        def check_and_go_on() -> None:
            if next(looks) % _LOOK_EVERY == 0:
                self._look(process, worker)
                self._check_flights(process, worker._door.core, flights)
            between()

        worker._runner._between = check_and_go_on

    def _look(self, process: Process, worker: Worker) -> None:
        """Blocks are conserved, epochs only grow, and answers go on from what they are."""
        core = worker._door.core
        self._check_tokens(process, core)
        try:
            self._check_books(process, core)
            self._check_loans(process, worker)
        except AssertionError as error:
            self._found.append(f"{process.name}: the books are wrong: {error}")
        before = self._last_worker_epochs.get(process, 0)
        if core._plans.epoch < before:
            self._found.append(f"{process.name} obeys epoch {core._plans.epoch} after {before}")
        self._last_worker_epochs[process] = core._plans.epoch

    def _check_flights(self, process: Process, core: StepCore, flights: Iterable[_Flight]) -> None:
        """Blocks that a step in flight writes to belong to a sequence, or wait for the step."""
        table = core._table
        tables = (*(held.blocks for held in table._held.values()), *table.in_flight.blocks)
        held = {block for blocks in tables for block in blocks}
        for flight in flights:
            if lost := flight.written - held:
                self._found.append(
                    f"{process.name}: blocks {sorted(lost)} of a step in flight are given away"
                )

    def _check_books(self, process: Process, core: StepCore) -> None:
        """Raises AssertionError. Blocks on their way to or from another worker are somebody's, too."""
        pool: Any = core._table.pool
        loans = self._fleet.loans.get(process, ())
        lent = [block for loan in loans for block in loan.blocks]
        with patch.object(core._table, "pool", _Counted(pool, lent)) if lent else nullcontext():
            core.check_integrity()

    def _check_loans(self, process: Process, worker: Worker) -> None:
        """Raises AssertionError. What is lent has one debtor, and a slot at a creditor holds what the cache
        that has it sent there."""
        neighbourhood = worker._neighbours
        lending, loans = neighbourhood._lending, neighbourhood._loans
        for books in (lending.debts, lending.grants):
            books.check_integrity()
        if loans is None:
            return
        loans.debts.check_integrity()
        sent = cast(SentBlocks, loans._tier).sent
        for number, place in loans._ways._places.items():
            if number in sent and (kept := self._kept(process, place)) is not None:
                assert kept == sent[number], f"a slot at {place.creditor[0]} was overwritten"

    def _kept(self, debtor: Process, place: SlotPlace) -> bytes | None:
        """What is there, where the creditor lives and the grant lasts."""
        creditor = self._fleet.present.get(place.creditor[0])
        worker = None if creditor is None or not creditor.alive else self._fleet.workers.get(creditor)
        if creditor is None or worker is None or worker._bus.incarnation != place.creditor[1]:
            return None
        lent = worker._neighbours._lending.grants._grants.get(place.slot.grant_id)
        if lent is None or lent.over or place.slot.block not in lent.blocks:
            return None
        assert lent.debtor[0] == debtor.name, "a grant is somebody else's"
        records = self._fleet.keepers[creditor]
        row = np.empty(records.record_bytes, dtype=np.uint8)
        records.read([place.slot.block], [row])
        return bytes(row)

    def _check_tokens(self, process: Process, core: StepCore) -> None:
        """What a sequence has of its answer, from whomever it got it, is what the undisturbed engine says."""
        for held in core._table._held.values():
            key = process, held.ref
            checked = self._checked_tokens.get(key, 0)
            answer = held.tokens[held.prompt_tokens :]
            for index in range(checked, len(answer)):
                expected = token_at(held.sampling, held.ref.choice, index, self._vocabulary)
                if answer[index] != expected:
                    self._found.append(f"{process.name} has another token at {index} of {held.ref}")
                    return
            self._checked_tokens[key] = len(answer)

    def check_answers(self) -> None:
        """Nothing that was said is wrong."""
        for asked in self._clients.asked:
            if asked.wrong:
                raise Violation(f"question of seed {asked.question.seed}: {asked.wrong}")

    def check_over(self) -> None:
        """Every question has its answer."""
        waiting = [asked for asked in self._clients.asked if not asked.is_over]
        if waiting:
            told = ", ".join(f"seed {each.question.seed} (tries {each.tries})" for each in waiting)
            raise Violation(f"no answer within {ANSWERS_WITHIN_S:g} s of the last trouble: {told}")

    def is_quiet(self) -> bool:
        """Nothing is left of any answer: no sequences, no blocks in use."""
        return not self._left()

    def check_quiet(self) -> None:
        if left := self._left():
            raise Violation(f"left {QUIET_WITHIN_S:g} s after the last answer: {'; '.join(left)}")

    def _left(self) -> list[str]:
        left = []
        for process in self._fleet.alive("worker"):
            worker = self._fleet.workers.get(process)
            if worker is None:
                continue
            table = worker._door.core._table
            if table._held:
                left.append(f"{process.name} holds {[str(held.ref) for held in table._held.values()]}")
            pool = table.pool
            idle = pool.free_blocks + pool.evictable_blocks
            if idle != pool.total_blocks:
                left.append(f"{process.name} has {pool.total_blocks - idle} blocks in use")
            lending = worker._neighbours._lending
            grants = lending.grants._grants.values()
            lent_to = {lent.debtor[0]: len(lent.blocks) for lent in grants if not lent.for_cache}
            if owed := {**lent_to, **lending.debts.borrowed_from()}:
                left.append(f"{process.name} lends or has borrowed blocks: {owed}")
            recalls = lending._recalls
            kept = 0 if recalls is None else len(recalls._core.bounce) + len(recalls._spare)
            if pool.base.withdrawn_blocks != kept:
                left.append(
                    f"{process.name} has {pool.base.withdrawn_blocks} own blocks withdrawn, and uses {kept}"
                )
            lent_host = np.count_nonzero(lending.grants._grant_of[KvTier.HOST])
            if (host := lending._stock.host_free_blocks + lent_host) != lending.grants.host_blocks:
                left.append(f"{process.name} has {host} blocks of host memory")
            if worker._store is not None and worker._store.cache.shadows.open_places:
                left.append(f"{process.name} has slots set aside for shadows that never came")
        left += self._open_loans()
        for process in self._fleet.alive("gateway"):
            sessions = self._fleet.sessions.get(process)
            if sessions is not None and sessions.active:
                left.append(f"{process.name} has {sessions.active} sequences open")
        return left

    def _open_loans(self) -> list[str]:
        """For prefix caches: what creditors, debtors and caches do not agree in, and what is under way."""
        left: list[str] = []
        lent: dict[GrantKey, set[int]] = {}
        owed: dict[GrantKey, set[int]] = {}
        for process in self._fleet.alive("worker"):
            worker = self._fleet.workers.get(process)
            if worker is None:
                continue
            me = worker._bus.instance, worker._bus.incarnation
            for grant in worker._neighbours._lending.grants._grants.values():
                if grant.for_cache:
                    lent[GrantKey(*me, grant.grant_id)] = set(grant.blocks)
            loans = worker._neighbours._loans
            if loans is None:
                continue
            owed |= {key: set(loan.blocks) for key, loan in loans.debts.grants.items()}
            peers = loans._cache.peers
            if under_way := [*loans._debtor._open, *map(str, peers.open.values())]:
                left.append(f"{process.name} is at {', '.join(under_way)} for its cache")
            slots = {*peers._books.peers._free, *peers._books.peers._used}
            used = loans.debts.in_state(BlockState.USED)
            if slots != set(used) or slots != loans._ways._places.keys():
                left.append(f"{process.name} has slots {slots} at peers, and owes {used}")
        if lent != owed:
            left.append(f"for caches are lent {lent}, and owed {owed}")
        return left

    def _check_terms(self) -> None:
        for process, term in self._fleet.terms[self._terms :]:
            before = self._epochs.setdefault((term._shard.number, term.epoch), process)
            if before is not process:
                raise Violation(f"{process.name} leads in epoch {term.epoch}, as {before.name} has")
        self._terms = len(self._fleet.terms)

    def _check_leases(self) -> None:
        """Raises Violation. Nobody leads for long without renewing the lease."""
        for (role, name), renewed_s in self._renewed_s.items():
            process = self._fleet.present[name]
            service = self._fleet.schedulers.get(process) if process.alive else None
            led = [] if service is None else [Shard(number).role for number in service._terms]
            since_s = max(renewed_s, process.frozen_until_s, process.loop.strand.hangs_until_s)
            if role in led and (unheld_s := self._fleet.world.now_s - since_s) > _UNRENEWED_S:
                raise Violation(f"{name} leads, and has not renewed the lease of {role} for {unheld_s:.1f} s")

    def _check_shards(self) -> None:
        """Raises Violation. A shard plans its own workers, and keeps nothing that it has handed over."""
        latest = {term._shard: (process, term) for process, term in self._fleet.terms}
        for shard, (process, term) in latest.items():
            if not process.alive or term.end_reason is not None:
                continue
            for cell in term._cells:
                roster = cell.core._roster
                if strangers := [name for name in roster.pipelines if not shard.has(name)]:
                    raise Violation(f"{process.name} plans {strangers} in shard {shard.number}")
                for key, sequence in roster.sequences.items():
                    handed = self._handed.get(key)
                    if handed is None or (handed.from_shard, handed.epoch) != (shard.number, term.epoch):
                        continue  # a later term may find it at a worker that knows nothing of it
                    if sequence.ref.attempt <= handed.ref.attempt:
                        raise Violation(f"shard {shard.number} has {sequence.ref}, and handed it over")

    def _on_route(self, subject: str, data: bytes) -> None:
        if subject.startswith(f"{subjects.scheduler_handed.stem}."):
            event = decode(data, SequenceHandedOver)
            self._handed[event.ref.key] = event
        elif self._is_sharded and subject.startswith(f"{subjects.scheduler_submit.stem}."):
            spec, shard = decode(data, SubmitSequence).spec, subject.rpartition(".")[0]
            if self._submitted.setdefault((spec.gateway_incarnation, spec.ref), shard) != shard:
                self._found.append(f"{spec.ref} is submitted to two shards")

    def _on_put(self, role: str, value: bytes, revision: int) -> None:
        """A lease is taken from nobody who lives, is heard, and has renewed it in time. A cluster's revisions
        only grow."""
        if revision <= self._last_revision and len(self._fleet.bus.servers) > 1:
            self._found.append(f"revision {revision} of {role} comes after {self._last_revision}")
        self._last_revision = revision
        try:
            holder = decode(value, LeaseHolder)
        except InvalidMessage:
            return
        now_s = self._fleet.world.now_s
        before, renewed_s = self._holders.get(role, (holder, now_s))
        if self._losses != self._fleet.bus.losses:  # it has forgotten who held what
            self._losses, before = self._fleet.bus.losses, holder
        self._holders[role] = holder, now_s
        if holder.instance:
            self._renewed_s[role, holder.instance] = now_s
        if not before.instance or before.instance == holder.instance or not holder.instance:
            return
        robbed, ago_s = self._fleet.present.get(before.instance), now_s - renewed_s
        if robbed is None or not robbed.alive or robbed.began_s > renewed_s:
            return
        wires = (each for each in self._fleet.bus.all if each.process is robbed)
        has_left = any(each.breaks or not each.is_open for each in wires)  # it may have moved, too
        if not has_left and ago_s < self._lease_ttl_s / 2:
            self._found.append(
                f"{holder.instance} takes {role} from {before.instance}, who renewed it {ago_s:.3f} s ago"
            )

    def _on_unhandled(self, process: Process, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._found.append(f"{process.name}: nobody handles {error!r} ({context.get('message')})")

    def log_handler(self) -> logging.Handler:
        """What is logged with a traceback was not foreseen."""
        found, world = self._found, self._fleet.world

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                who = "world" if world.strand is None else world.strand.name
                if record.exc_info and record.exc_info[1] is not None:
                    found.append(f"{who}: {record.getMessage()}: {record.exc_info[1]!r}")

        return Handler(level=logging.ERROR)
