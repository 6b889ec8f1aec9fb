"""One stream in a world that loses, doubles and reorders: a state machine for hypothesis. Workers are models:
which attempt each holds and how much of the true answer. At the end everything works again, and the answer
must be completed."""

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.gateway.core.stream import Fetch, Stream, StreamEffects, StreamPhase, StreamTiming, Submit
from shared.errors import DeadlineExceeded
from shared.liveness import Start
from shared.messages.reports import SequenceReport, SequenceState
from shared.messages.sequence import FinishReason, SequenceRef
from shared.messages.tokens import TokenDelta
from tests.shared.messages.builders import sequence_report

KEY = ("req_1", 0)
TIMING = StreamTiming(frame_timeout_s=3, give_up_s=60)
A: Start = ("a", 1)
B: Start = ("b", 1)


def delta(
    attempt: int, first: int, tokens: tuple[int, ...], end: FinishReason | None = None, cached: int = 0
) -> TokenDelta:
    return TokenDelta(*KEY, attempt, first, tokens, end, cached)


def ref(attempt: int) -> SequenceRef:
    return SequenceRef(request_id=KEY[0], choice=KEY[1], attempt=attempt)


def listed(
    attempt: int, tokens: int, end: FinishReason | None = None, state: SequenceState = SequenceState.DECODING
) -> SequenceReport:
    return sequence_report(
        ref(attempt),
        SequenceState.ENDED if end else state,
        prompt_tokens=3,
        generated_tokens=tokens,
        finish_reason=end,
    )


def begun() -> Stream:
    """Submitted, taken by the scheduler, two tokens received from A."""
    stream = Stream(KEY, TIMING, 0.0)
    assert stream.submit(0.0) == (Submit(1, 1),) and stream.on_submitted(1, 0.1) == ()
    assert stream.on_delta(delta(1, 0, (10, 11)), A, 0.2) == ()
    stream.check_integrity()
    return stream


TRUTH = tuple(range(100, 112))


@dataclass
class World:
    """A worker in the model: which attempt it holds, and how much of the answer it has."""

    start: Start
    attempt: int = 0
    tokens: list[int] = field(default_factory=list)
    is_stale: bool = False

    @property
    def end(self) -> FinishReason | None:
        return FinishReason.STOP if len(self.tokens) == len(TRUTH) else None

    def report(self) -> SequenceReport:
        return listed(self.attempt, len(self.tokens), self.end)

    def delta(self, first: int) -> TokenDelta:
        return delta(self.attempt, first, tuple(self.tokens[first:]), self.end)


@dataclass
class Flight:
    """Something on its way: a delta or report of a worker, or a command with the time it was sent at."""

    what: TokenDelta | SequenceReport | Submit | Fetch
    worker: Start = A
    held: int = 0


class Anything(RuleBasedStateMachine):
    """Messages dropped, doubled, reordered; workers lost and woken; schedulers replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.workers = [World(A), World(B)]
        self.known = 0
        self.flights: list[Flight] = []
        timing = StreamTiming(give_up_s=1e9)
        self.stream = Stream(KEY, timing, 0.0)
        self.do(self.stream.submit(0.0))

    def do(self, effects: StreamEffects) -> None:
        for effect in effects:
            if isinstance(effect, Submit):
                self.flights.append(Flight(effect, held=len(self.stream.tokens)))
            elif isinstance(effect, Fetch):
                self.flights.append(Flight(effect, effect.worker))
            else:
                for worker in self.workers:
                    if worker.start[0] == effect.worker_id and worker.attempt <= effect.ref.attempt:
                        worker.attempt, worker.tokens = 0, []
        for worker in self.workers:
            worker.is_stale = worker.attempt < self.stream.attempt

    def compute(self, worker: World) -> None:
        """One step. A superseded attempt goes astray, so that a single token taken from it shows."""
        if worker.attempt and worker.end is None:
            true = TRUTH[len(worker.tokens)]
            worker.tokens.append(-true if worker.is_stale else true)
            self.flights.append(Flight(worker.delta(len(worker.tokens) - 1), worker.start))

    def deliver(self, flight: Flight, place: int = 0) -> None:
        what = flight.what
        if isinstance(what, TokenDelta):
            self.do(self.stream.on_delta(what, flight.worker, self.now_s))
        elif isinstance(what, SequenceReport):
            self.do(self.stream.on_report(what, flight.worker, self.now_s))
        elif isinstance(what, Submit):
            if what.attempt > self.known:
                self.known = what.attempt
                worker = self.workers[place]
                worker.attempt, worker.tokens = what.attempt, list(TRUTH[: flight.held])
            self.do(self.stream.on_submitted(what.serial, self.now_s))
        else:
            worker = next(w for w in self.workers if w.start[0] == what.worker[0])
            holds = worker.start == what.worker and worker.attempt == what.ref.attempt
            answer = worker.delta(what.first_index) if holds else None
            self.do(self.stream.on_fetched(what.ref, answer, what.worker, self.now_s))

    @rule(at=st.integers(0, 1), steps=st.integers(1, 4))
    def work(self, at: int, steps: int) -> None:
        for _ in range(steps):
            self.compute(self.workers[at])

    @rule(at=st.integers(0, 1))
    def beat(self, at: int) -> None:
        worker = self.workers[at]
        if worker.attempt:
            self.flights.append(Flight(worker.report(), worker.start))

    @precondition(lambda self: self.flights)
    @rule(data=st.data(), place=st.integers(0, 1), twice=st.booleans())
    def arrive(self, data: st.DataObject, place: int, twice: bool) -> None:
        flight = self.flights.pop(data.draw(st.integers(0, len(self.flights) - 1)))
        self.deliver(flight, place)
        if twice:
            self.deliver(flight, place)

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def vanish(self, data: st.DataObject) -> None:
        what = self.flights.pop(data.draw(st.integers(0, len(self.flights) - 1))).what
        if isinstance(what, Submit):
            self.do(self.stream.on_submit_failed(what.serial, DeadlineExceeded("lost"), self.now_s))
        elif isinstance(what, Fetch):
            self.do(self.stream.on_fetch_failed(what.ref, self.now_s))

    @rule(at=st.integers(0, 1), dies=st.booleans())
    def lose(self, at: int, dies: bool) -> None:
        """A worker is given up; unless it died it goes on, and its frames go on arriving."""
        worker = self.workers[at]
        start, attempt = worker.start, worker.attempt or None
        if dies:
            self.workers[at] = World((start[0], start[1] + 1))
        self.do(self.stream.on_worker_lost(start, attempt, self.now_s))

    @rule(stale=st.booleans())
    def prepare(self, stale: bool) -> None:
        """Another worker is said to be ready, for the present attempt or for an earlier one."""
        attempt = max(1, self.stream.attempt - stale)
        self.do(self.stream.on_prepared(ref(attempt), self.now_s))

    @rule()
    def replace_scheduler(self) -> None:
        self.known = max((worker.attempt for worker in self.workers), default=0)
        self.do(self.stream.submit(self.now_s))

    @rule(seconds=st.sampled_from([0.1, 0.3, 1.0, 4.0, 8.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.do(self.stream.on_tick(self.now_s))

    @invariant()
    def holds(self) -> None:
        self.stream.check_integrity()
        assert tuple(self.stream.tokens) == TRUTH[: len(self.stream.tokens)]
        assert self.stream.phase in (StreamPhase.OPEN, StreamPhase.ENDED)
        if self.stream.phase is StreamPhase.ENDED:
            assert tuple(self.stream.tokens) == TRUTH

    def teardown(self) -> None:
        """Once everything works again, the answer is completed."""
        for _ in range(400):
            if not self.stream.is_open:
                break
            for worker in self.workers:
                self.compute(worker)
                if worker.attempt:
                    self.flights.append(Flight(worker.report(), worker.start))
            for flight in [self.flights.pop(0) for _ in range(len(self.flights))]:
                self.deliver(flight)
            self.wait(0.1)
            self.holds()
        assert tuple(self.stream.tokens) == TRUTH and self.stream.phase is StreamPhase.ENDED
