"""The simulation loop: requests arrive, policies plan and workers run until every request has ended.

`BatchPolicy` objects get the same events in the same order as from the live scheduler's core. An invalid plan
raises `PlanError`; requests that are never planned again raise `WedgeError`. Source: algorithms.md §1;
`sim/worker.py` describes plans made ahead.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from msgspec import structs

from services.placement.core.roles import Landing, Role, WorkerLoad
from services.placement.core.seats import seat
from services.scheduler.core.backlog import Feed
from services.scheduler.core.rules import PLACEMENT_BATCH
from services.scheduler.policy import find_policy
from services.scheduler.policy.contract import PlannedBatch, Task, priority_in, queue_rule
from services.scheduler.policy.fleet_queue import FleetQueue, Rank
from shared.messages.commands import PlacementItem
from shared.messages.sequence import SequenceKey, SequenceRef, Tenant
from sim.books import Held, WorkerBooks, pending
from sim.cores import SharedCores
from sim.events import EventPriority, EventQueue
from sim.handover import HandoverTransfers, Transfer
from sim.meters import WorkerMeter
from sim.prefixes import SimPrefixes
from sim.requests import ServedRecord, SimRequest
from sim.rooms import SimRooms
from sim.setup import Outcome, Setup
from sim.worker import SimWorker

ROLES_EPOCH_S = 1.0
"""Interval between updates of worker roles."""


class WedgeError(AssertionError):
    """Requests are unfinished and no event is left."""


class Simulation:
    """One run over `requests`. `on_end` is called for each ended request and may raise to stop the run."""

    def __init__(
        self,
        setup: Setup,
        requests: Sequence[SimRequest],
        on_end: Callable[[ServedRecord], None] | None = None,
    ) -> None:
        factory = find_policy(setup.policy)
        self._cores = None if setup.cores is None else SharedCores(setup.cores, setup.workers)
        self._setup = setup
        self._events: EventQueue[tuple[Callable[..., None], tuple[object, ...]]] = EventQueue()
        self._requests = sorted(requests, key=lambda request: (request.arrival_s, request.index))
        self._records = {request.key: ServedRecord(request) for request in self._requests}
        self._workers = [
            SimWorker(
                factory(setup.shape, setup.settings),
                WorkerBooks(setup.shape, setup.settings, {}, set()),
                setup.cost,
                WorkerMeter(warm_s=setup.warm_s),
                setup.outstanding_steps,
                setup.ahead_s,
                followed_s=setup.step_ends_s[index] if index < len(setup.step_ends_s) else (),
                cores=self._cores,
                number=index,
            )
            for index in range(setup.workers)
        ]
        self._feed = Feed(setup.places)
        self._queue = FleetQueue(queue_rule(factory, setup.settings, setup.queue))
        self._feed.on_left = self._queue.begin
        self._names = [f"{index:05d}" for index in range(setup.workers)]
        for name in self._names:
            self._feed.join(name)
        self._prefixes: SimPrefixes | None = None
        if setup.cache_blocks:
            self._prefixes = SimPrefixes(
                self._names, setup.cache_blocks, setup.cache_block_tokens, setup.eviction
            )
        for index, worker in enumerate(self._workers):
            worker.on_begin = partial(self._find_prefix, index)
            if setup.found_tokens and not setup.cache_blocks:
                worker.on_begin = partial(self._find_again, worker)
        self._transfers = HandoverTransfers(setup.wire)
        self._rooms = SimRooms(
            setup, self._names, self._workers, self._records, self._prefixes, self._transfers, self._events
        )
        self._epoch_s = 0.0
        if setup.roles is not None:
            setup.roles.on_workers(self._names)
        self._given: dict[SequenceKey, Task] = {}
        """Tasks at workers; kept only if workers have roles."""
        self._is_plan_due = [False] * setup.workers
        self._tasks: dict[SequenceKey, Task] = {}
        """Tasks in the queue."""
        self._ranks: dict[SequenceKey, Rank] = {}
        """Ranks of requests at workers, fixed when they were placed."""
        self._refreshed: dict[SequenceKey, int] = {}
        """Number of refreshed predictions by request."""
        self._arrived = self._ended = self._refused = 0
        self._on_end = on_end

    def run(self) -> Outcome:
        """Run until the last request ends. Raises PlanError, WedgeError, or AssertionError from a policy's
        check.
        """
        self._push_arrival()
        while len(self._events):
            _, (handler, arguments) = self._events.pop()
            handler(*arguments)
        if self._ended + self._refused < len(self._requests):
            raise WedgeError(f"{self._setup.policy}: {self._stuck()}")
        meters = [worker.meter for worker in self._workers]
        served = list(self._records.values())
        return Outcome(served, meters, self._setup.shape, self._events.now_s, self._refused)

    def _stuck(self) -> str:
        held = [held for worker in self._workers for held in worker.books.held.values()]
        shown = [
            f"{h.record.request.key[0]}: {h.computed_tokens}/{h.prefill_tokens} tokens, "
            f"{h.allocated_blocks} blocks"
            for h in held[:4]
        ]
        waits = f"{len(held)} of {len(self._requests)} requests wait for ever"
        return f"{waits} at {self._events.now_s:.3f} s: {shown}"

    def _push_arrival(self) -> None:
        if self._arrived < len(self._requests):
            at_s = max(self._events.now_s, self._requests[self._arrived].arrival_s)
            self._events.push(
                at_s, EventPriority.ARRIVAL, (self._on_arrival, (self._requests[self._arrived],))
            )
            self._arrived += 1

    def _on_arrival(self, request: SimRequest) -> None:
        is_known = self._setup.prediction_delay_s == 0.0
        told = self._setup.predictor.predict(request, 0) if is_known else None
        task = Task(
            request.key,
            request.prompt_tokens,
            request.max_tokens,
            request.arrival_s,
            prediction=told,
            priority=priority_in(request.tenant.service_class, 0),
        )
        if self._is_refused(task, request.tenant):
            self._refused += 1
            del self._records[request.key]
            self._push_arrival()
            return
        self._queue.add(task, request.tenant)
        self._tasks[request.key] = task
        if self._cores is not None:
            self._cores.arrive(self._events.now_s)
        if not is_known:
            self._push_answer(request, 0)
        self._hand_out()
        self._push_arrival()

    def _is_refused(self, task: Task, tenant: Tenant) -> bool:
        most_s = self._setup.refuse_wait_s
        if not most_s:
            return False
        self._queue.foreseen.on_tick(self._events.now_s, len(self._workers))
        wait_s = self._queue.wait_s(task, tenant)
        return wait_s is not None and wait_s > most_s

    def _hand_out(self) -> None:
        """Place queued requests at workers until none fits, with the live scheduler's questions to
        placement."""
        self._settle_roles()
        if not len(self._queue):
            return
        is_over = False
        while not is_over and len(self._queue) and (keys := self._queue.next(PLACEMENT_BATCH)):
            ahead = self._feed.ahead(self._queue.rank(keys[0]))
            if ahead is None:
                return
            items = [self._item(key) for key in keys]
            choices = seat(items, self._rooms.of(ahead, len(items)), self._setup.router, self._rooms.cached)
            for key, choice in zip(keys, choices, strict=True):
                if choice is not None:
                    self._give(key, self._setup.placed.get(key, int(choice.worker_id)))
            is_over = not any(choices) or not len(self._queue)

    def _give(self, key: SequenceKey, index: int) -> None:
        worker, record, task = self._workers[index], self._records[key], self._tasks.pop(key)
        rank = self._ranks[key] = self._queue.start(key)
        record.worker = index
        worker.books.take(Held(record))
        self._rooms.note_change(index)
        if self._setup.roles is not None:
            self._given[key] = task
        if self._prefixes is not None and record.request.names:
            name, names, now_s = self._names[index], record.request.names, self._events.now_s
            record.expected_tokens = sum(self._prefixes.expected(name, names, now_s))
            self._prefixes.expect(name, names, now_s)
        if self._setup.roles is not None:
            self._setup.roles.on_placed(key, task.prompt_tokens, record.expected_tokens, self._events.now_s)
        self._feed.add(self._names[index], key, rank, task.prompt_tokens)
        worker.policy.on_arrival(structs.replace(task, priority=rank[0]), self._events.now_s)
        worker.is_urgent = True
        self._push_plan(index)

    def _item(self, key: SequenceKey) -> PlacementItem:
        task = self._tasks[key]
        ref = SequenceRef(request_id=key[0], choice=key[1], attempt=1)
        return PlacementItem(
            ref=ref,
            size_tokens=task.prompt_tokens,
            limit_tokens=task.prompt_tokens + task.max_tokens,
            waited_s=self._events.now_s - task.arrival_s,
        )

    def _push_answer(self, request: SimRequest, generated_tokens: int) -> None:
        at_s = self._events.now_s + self._setup.prediction_delay_s
        self._events.push(at_s, EventPriority.ANSWER, (self._on_answer, (request, generated_tokens)))

    def _on_answer(self, request: SimRequest, generated_tokens: int) -> None:
        told = self._setup.predictor.predict(request, generated_tokens)
        if told is None:
            return
        if request.key in self._tasks:
            self._tasks[request.key] = structs.replace(self._tasks[request.key], prediction=told)
            self._queue.on_predicted(request.key, told)
            return
        index = self._records[request.key].worker
        self._queue.on_predicted(request.key, told)
        if request.key in self._workers[index].books.held:
            self._workers[index].policy.on_predicted(request.key, told, self._events.now_s)
            self._push_plan(index)

    def _push_plan(self, index: int) -> None:
        if not self._is_plan_due[index]:
            self._is_plan_due[index] = True
            self._events.push(self._events.now_s, EventPriority.PLAN, (self._on_plan, (index,)))

    def _on_plan(self, index: int) -> None:
        worker, now_s = self._workers[index], self._events.now_s
        self._is_plan_due[index] = False
        self._rooms.note_change(index)
        before = worker.stretch_end()
        self._note_plans(index, worker.next_plans(now_s))
        self._check(worker)
        self._hand_out()
        after = worker.stretch_end()
        if after is not None and after != before:
            self._events.push(after[0], EventPriority.STEP, (self._on_stretch_end, (index, after[1])))

    def _note_plans(self, index: int, batches: Iterable[PlannedBatch]) -> None:
        """Update the set of sequences that wait, and request the predictions that policies ask for."""
        for batch in batches:
            for preemption in batch.preemptions:
                if preemption.key in self._workers[index].books.held:
                    held = self._workers[index].books.held[preemption.key]
                    rank = self._ranks[preemption.key]
                    self._feed.add(self._names[index], preemption.key, rank, held.prefill_tokens)
            for prefill in batch.prefills:
                self._feed.discard(self._names[index], prefill.key)
            for question in batch.questions:
                self._push_answer(self._records[question.key].request, question.generated_tokens)

    def _on_stretch_end(self, index: int, serial: int) -> None:
        worker = self._workers[index]
        if not worker.is_current(serial):
            return
        running = list(worker.books.held.values()) if self._prefixes is not None else []
        began_s, chunks = worker.chunks() if self._setup.roles is not None else (0.0, [])
        ended = worker.advance(self._events.now_s)
        self._rooms.note_change(index)
        for held in running:
            self._keep_prefix(index, held)
        for held in ended:
            self._feed.discard(self._names[index], held.record.request.key)
            self._note_end(held.record)
        if self._setup.roles is not None:
            self._send_on(index, began_s, chunks)
        self._refresh(worker)
        self._note_speeds(worker)
        self._check(worker)
        after = worker.stretch_end()
        if after is not None:
            self._events.push(after[0], EventPriority.STEP, (self._on_stretch_end, (index, after[1])))
        if len(self._queue) or worker.may_plan(self._events.now_s):
            self._push_plan(index)

    def _find_prefix(self, index: int, held: Held) -> None:
        """At the start of a prefill, find the cached prefix: whole blocks, without the last token."""
        key = held.record.request.key
        carried_tokens, held.carried_tokens = held.carried_tokens, 0
        if carried_tokens:
            held.cached_tokens = carried_tokens
            self._workers[index].policy.on_prefix_hit(key, carried_tokens, self._events.now_s)
            return
        held.cached_tokens = 0
        if self._prefixes is None:
            return
        found = self._prefixes.find(self._names[index], held.record.request.names)
        if held.record.first_token_s < 0:
            held.record.cached_tokens = found
        held.cached_tokens = min(found, held.prefill_tokens - 1)
        if held.cached_tokens:
            self._workers[index].policy.on_prefix_hit(key, held.cached_tokens, self._events.now_s)

    def _find_again(self, worker: SimWorker, held: Held) -> None:
        """At the start of a prefill, apply the cache hit of the replayed run."""
        key = held.record.request.key
        held.cached_tokens = min(self._setup.found_tokens.get(key, 0), held.prefill_tokens - 1)
        if held.cached_tokens:
            worker.policy.on_prefix_hit(key, held.cached_tokens, self._events.now_s)

    def _keep_prefix(self, index: int, held: Held) -> None:
        """Keep the blocks of a prompt that was computed just now."""
        if self._prefixes is not None and held.record.first_token_s == self._events.now_s:
            self._prefixes.keep(self._names[index], held.record.request.names)

    # Roles and hand-overs

    def _settle_roles(self) -> None:
        """Update roles once per `ROLES_EPOCH_S`."""
        roles = self._setup.roles
        if roles is None or (now_s := self._events.now_s) < self._epoch_s:
            return
        self._epoch_s = now_s + ROLES_EPOCH_S
        waiting_tokens = sum(task.prompt_tokens for task in self._tasks.values())
        loads = [self._load(index) for index in range(len(self._workers))]
        roles.on_epoch(loads, waiting_tokens, self._setup.settings.token_budget, now_s)

    def _load(self, index: int) -> WorkerLoad:
        worker, shape = self._workers[index], self._setup.shape
        contexts = [held.computed_tokens for held in worker.books.held.values() if held.is_decoding]
        return WorkerLoad(
            self._names[index],
            shape.capacity_blocks * shape.block_tokens,
            sum(contexts),
            len(contexts),
            pending(worker.books),
            worker.meter.prefill_tokens_per_s,
            worker.meter.decode_step_s,
            self._setup.wire.tokens_per_s,
            worker.meter.prefill_context_tokens,
        )

    def _send_on(self, index: int, began_s: float, chunks: Sequence[tuple[Held, int]]) -> None:
        """After a stretch, send the prefilled KV on and move sequences that left to their targets."""
        worker, now_s = self._workers[index], self._events.now_s
        for held in worker.left:
            self._arrive(held)
        worker.left.clear()
        assert self._setup.roles is not None
        if self._setup.roles.role_of(self._names[index]) is not Role.PREFILL:
            return
        for held, tokens in chunks:
            if held.record.request.key in worker.books.held:
                self._send(index, held, tokens, began_s)
        for held in list(worker.books.held.values()):
            if held.is_decoding and held.record.request.key not in self._transfers.under_way:
                self._send(index, held, held.computed_tokens, now_s)

    def _send(self, index: int, held: Held, tokens: int, began_s: float) -> None:
        key, now_s = held.record.request.key, self._events.now_s
        one = self._transfers.under_way.get(key)
        if one is None:
            target = self._landing(index, held)
            if target is None:
                return
            one = self._transfers.under_way[key] = Transfer(held, self._given[key], index, target)
            tokens = held.computed_tokens
        if one.is_due:
            return
        arrives_s = self._transfers.send(one, tokens, began_s, now_s)
        if held.is_decoding:
            one.is_due = True
            self._events.push(max(now_s, arrives_s), EventPriority.ARRIVAL, (self._on_sent, (one,)))

    def _landing(self, index: int, held: Held) -> int | None:
        """Return the worker that continues the sequence, or None if none has room."""
        roles, size = self._setup.roles, self._setup.shape.block_tokens
        assert roles is not None
        needed = -(-(held.prefill_tokens + 1) // size) + 1
        now_s = self._events.now_s
        landings = [
            Landing(self._load(at), self._transfers.wait_s(index, at, now_s))
            for at, name in enumerate(self._names)
            if at != index and roles.role_of(name).may_decode and self._rooms.free_blocks(at) >= needed
        ]
        chosen = roles.hand_over(held.computed_tokens, self._load(index), landings).worker_id
        return None if chosen is None else int(chosen)

    def _on_sent(self, one: Transfer) -> None:
        """The sequence's KV has arrived: hand it over after the current step."""
        worker, key = self._workers[one.source], one.held.record.request.key
        if worker.books.held.get(key) is not one.held or not one.held.is_decoding:
            self._transfers.under_way.pop(key, None)
            return
        one.held.goes_to = one.target
        if worker.can_leave(one.held):
            worker.hand_over(one.held, self._events.now_s)
            for held in worker.left:
                self._arrive(held)
            worker.left.clear()
            self._push_plan(one.source)
            return
        before = worker.stretch_end()
        worker.end_after_step(self._events.now_s)
        after = worker.stretch_end()
        if after is not None and after != before:
            self._events.push(after[0], EventPriority.STEP, (self._on_stretch_end, (one.source, after[1])))

    def _arrive(self, left: Held) -> None:
        """Start a handed-over sequence at its target, where its last, partial block is computed again."""
        record, now_s = left.record, self._events.now_s
        key, size = record.request.key, self._setup.shape.block_tokens
        one = self._transfers.under_way.pop(key)
        held = replace(left, allocated_blocks=0, computed_tokens=0, is_decoding=False, goes_to=None)
        held.carried_tokens = held.cached_tokens = (held.prefill_tokens - 1) // size * size
        held.was_evicted = True
        target = self._workers[one.target]
        record.worker = one.target
        record.handovers += 1
        target.books.take(held)
        if self._prefixes is not None:
            self._prefixes.keep(self._names[one.target], record.request.names)
        self._feed.discard(self._names[one.source], key)
        self._feed.add(self._names[one.target], key, self._ranks[key], 0)
        task = structs.replace(one.task, generated_tokens=held.generated_tokens, priority=self._ranks[key][0])
        target.policy.on_arrival(task, now_s)
        target.is_urgent = True
        self._push_plan(one.target)

    def _refresh(self, worker: SimWorker) -> None:
        """Apply refreshed predictions for the sequences at a worker."""
        every = self._setup.predictor.refresh_tokens
        if every is None:
            return
        for key, held in worker.books.held.items():
            count = held.generated_tokens // every
            if count > self._refreshed.get(key, 0):
                self._refreshed[key] = count
                told = self._setup.predictor.predict(held.record.request, held.generated_tokens)
                if told is not None:
                    worker.policy.on_predicted(key, told, self._events.now_s)

    def _note_speeds(self, worker: SimWorker) -> None:
        meter, shape = worker.meter, self._setup.shape
        if meter.told_s == self._events.now_s:
            memory_tokens = shape.capacity_blocks * shape.block_tokens
            self._queue.on_measured(meter.prefill_tokens_per_s, meter.decode_step_s, memory_tokens)

    def _note_end(self, record: ServedRecord) -> None:
        self._ended += 1
        if self._setup.roles is not None:
            roles, request = self._setup.roles, record.request
            roles.on_ended(request.key, request.output_tokens)
        self._queue.end(record.request.key, record.request.output_tokens)
        if self._setup.refuse_wait_s:
            self._queue.foreseen.on_tick(self._events.now_s, len(self._workers))
        self._setup.predictor.observe(record.request)
        if self._on_end is not None:
            self._on_end(record)

    def _check(self, worker: SimWorker) -> None:
        if self._setup.is_checked:
            worker.policy.check_integrity()
            worker.books.check_integrity()
