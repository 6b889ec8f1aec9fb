"""The gateway of the virtual world: its streams, and what it knows of the others from their heartbeats."""

from typing import Any

import msgspec

from services.gateway.core.stream import (
    Acknowledge,
    Cancel,
    Extend,
    Fetch,
    Stream,
    StreamEffect,
    StreamTiming,
    Submit,
)
from services.gateway.core.views import SchedulerView, WorkerTable
from shared.messages.commands import CancelSequence
from shared.messages.moves import MovePrepared
from shared.messages.reports import GatewayReported, SchedulerAnnounced, WorkerReported
from shared.messages.sequence import Sampling, SequenceKey, SequenceRef, SequenceSpec, pack_tokens
from shared.messages.tokens import AcknowledgeEnds, ExtendSequence, FetchTokens, TokenFrame
from tests.stack.actors import END_TOKEN, MODEL, Wanted
from tests.virtual_net import Process


class Gateway(Process):
    """Its core, which is the real one. `world` is what it lives in."""

    def __init__(self, world: Any, wanted: dict[SequenceKey, Wanted]) -> None:
        super().__init__("gateway-0")
        self.world, self.wanted, self.incarnation = world, wanted, 1
        self.streams: dict[SequenceKey, Stream] = {}
        self.table, self.view = WorkerTable([MODEL], 3.0), SchedulerView(3.0)

    def submit(self, key: SequenceKey) -> None:
        timing = StreamTiming(give_up_s=500.0)
        self.streams[key] = Stream(key, timing, self.world.now_s, b"secret")
        self.apply(key, self.streams[key].submit(self.world.now_s))

    def apply(self, key: SequenceKey, effects: tuple[StreamEffect, ...]) -> None:
        for effect in effects:
            self._carry_out(key, effect)
        self.streams[key].check_integrity()

    def _carry_out(self, key: SequenceKey, effect: StreamEffect) -> None:
        match effect:
            case Submit(attempt, serial):
                stream, spec = self.streams[key], self.spec(key, attempt)
                self.world.ask(
                    self,
                    self.world.scheduler,
                    lambda: self.world.submitted(spec),
                    lambda _: self.apply(key, stream.on_submitted(serial, self.world.now_s)),
                    lambda error: self.apply(key, stream.on_submit_failed(serial, error, self.world.now_s)),
                )
            case Fetch(worker_start, ref, first_index):
                stream, worker = self.streams[key], self.world.workers[worker_start[0]]
                question = FetchTokens(ref=ref, sender=self.name, first_index=first_index)
                self.world.ask(
                    self,
                    worker,
                    lambda: worker.core.on_fetch(question),
                    lambda found: self.apply(
                        key, stream.on_fetched(ref, found.delta, worker_start, self.world.now_s)
                    ),
                    lambda _: self.apply(key, stream.on_fetch_failed(ref, self.world.now_s)),
                )
            case Acknowledge(worker_id, ref):
                seen = AcknowledgeEnds(refs=(ref,), sender=self.name)
                self.world.to_worker(
                    self.name, worker_id, lambda core: core.on_acknowledge(seen, self.world.now_s)
                )
            case Extend(worker_id, ref, first_index, tokens):
                late = ExtendSequence(ref=ref, sender=self.name, first_index=first_index, tokens=tokens)
                self.world.to_worker(self.name, worker_id, lambda core: core.on_extend(late))
            case Cancel(ref, worker_id, is_final):
                command = CancelSequence(ref=ref, sender=self.name)
                if worker_id is not None:
                    self.world.to_worker(
                        self.name, worker_id, lambda core: core.on_cancel(command, self.world.now_s)
                    )
                if is_final:
                    self.world.send(
                        self.name, self.world.scheduler, lambda: self.world.feed("on_cancel", command)
                    )

    def spec(self, key: SequenceKey, attempt: int) -> SequenceSpec:
        wanted, stream = self.wanted[key], self.streams[key]
        return SequenceSpec(
            ref=msgspec.structs.replace(stream.ref, attempt=attempt),
            gateway_id=self.name,
            gateway_incarnation=self.incarnation,
            prompt=pack_tokens([wanted.word] * wanted.prompt_tokens),
            sampling=Sampling(seed=0, max_tokens=wanted.max_tokens, end_token_ids=(END_TOKEN,)),
            generated=pack_tokens(stream.tokens),
            open_tokens=stream.open_tokens(wanted.max_tokens),
            capability=stream.capability,
        )

    def tick(self) -> None:
        for start in self.table.on_tick(self.world.now_s):
            self.lose(start, {})
        for key, stream in self.streams.items():
            self.apply(key, stream.on_tick(self.world.now_s))

    def report(self) -> None:
        event = GatewayReported(gateway_id=self.name, incarnation=self.incarnation)
        self.world.send(
            self.name, self.world.scheduler, lambda: self.world.feed("on_gateway_reported", event)
        )
        for name in self.world.workers:
            self.world.to_worker(self.name, name, lambda core: core.on_gateway(event, self.world.now_s))

    def lose(self, start: tuple[str, int], attempts: dict[SequenceKey, int]) -> None:
        for key, stream in self.streams.items():
            self.apply(key, stream.on_worker_lost(start, attempts.get(key), self.world.now_s))

    def on_frame(self, frame: TokenFrame) -> None:
        for delta in frame.deltas:
            key = (delta.request_id, delta.choice)
            if delta.attempt == self.streams[key].attempt:
                start = (frame.worker_id, frame.incarnation)
                self.apply(key, self.streams[key].on_delta(delta, start, self.world.now_s))

    def on_beat(self, report: WorkerReported) -> None:
        start = (report.worker_id, report.incarnation)
        ended_run = self.table.on_report(report, self.world.now_s)
        if ended_run is not None:
            self.lose(ended_run, {})
        for listed in report.sequences:
            if not listed.gateway_id:
                continue
            key = listed.ref.key
            self.apply(key, self.streams[key].on_report(listed, start, self.world.now_s))

    def on_announced(self, event: SchedulerAnnounced) -> None:
        if self.view.on_announced(event, self.world.now_s):
            for key, stream in self.streams.items():
                self.apply(key, stream.submit(self.world.now_s))

    def on_given_up(self, ref: SequenceRef) -> None:
        stream = self.streams[ref.key]
        if stream.attempt == ref.attempt:
            self.apply(ref.key, stream.submit(self.world.now_s))

    def on_prepared(self, prepared: MovePrepared) -> None:
        stream = self.streams[prepared.ref.key]
        effects = stream.on_prepared(prepared.ref, self.world.now_s, prepared.target, prepared.open_tokens)
        self.apply(stream.key, effects)
