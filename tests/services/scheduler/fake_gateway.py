"""A gateway without HTTP: owns requests, resubmits, accepts frames by attempt and index, acknowledges
ends."""

from collections.abc import Callable
from dataclasses import dataclass, field

from shared.errors import KvasirError
from shared.messages.commands import CancelSequence
from shared.messages.moves import MovePrepared
from shared.messages.reports import SequenceState, WorkerLost, WorkerReported
from shared.messages.sequence import (
    FinishReason,
    Sampling,
    SequenceKey,
    SequenceRef,
    SequenceSpec,
    pack_tokens,
)
from shared.messages.tokens import TokenDelta
from tests.services.scheduler.fake_worker import END, FakeWorker, answer_token, natural_length

FRAME_TIMEOUT_S = 3.0

ToWorker = Callable[[str, Callable[[FakeWorker], object]], None]
ToAllWorkers = Callable[[Callable[[FakeWorker], object]], None]


@dataclass
class Request:
    """A sequence as its gateway sees it."""

    key: SequenceKey
    prompt: bytes
    max_tokens: int
    born_s: float
    attempt: int = 1
    tokens: list[int] = field(default_factory=list)
    ends: list[FinishReason] = field(default_factory=list)
    sign_s: float = 0.0
    cancelled: bool = False
    refused: KvasirError | None = None

    @property
    def ref(self) -> SequenceRef:
        return SequenceRef(request_id=self.key[0], choice=self.key[1], attempt=self.attempt)

    @property
    def expected(self) -> list[int]:
        length = natural_length(self.prompt)
        return [answer_token(self.key, index, length) for index in range(min(length, self.max_tokens))]

    @property
    def over(self) -> bool:
        return bool(self.ends) or self.cancelled or self.refused is not None


class FakeGateway:
    """`submit`, `to_worker` and `to_all_workers` send; each `on_…` is a message that arrives."""

    def __init__(
        self, submit: Callable[[Request], None], to_worker: ToWorker, to_all_workers: ToAllWorkers
    ) -> None:
        self.incarnation = 1
        self.requests: dict[SequenceKey, Request] = {}
        self._submit = submit
        self._to_worker = to_worker
        self._to_all_workers = to_all_workers

    def accept(
        self, name: str, prompt_tokens: int, answer_tokens: int, max_tokens: int, now_s: float
    ) -> Request:
        prompt = pack_tokens([answer_tokens, *([7] * (prompt_tokens - 1))])
        request = Request((name, 0), prompt, max_tokens, now_s, sign_s=now_s)
        self.requests[request.key] = request
        self._submit(request)
        return request

    def spec(self, request: Request, now_s: float) -> SequenceSpec:
        return SequenceSpec(
            ref=request.ref,
            gateway_id="gateway-0",
            gateway_incarnation=self.incarnation,
            prompt=request.prompt,
            sampling=Sampling(seed=1, max_tokens=request.max_tokens, end_token_ids=(END,)),
            generated=pack_tokens(request.tokens),
            waited_s=now_s - request.born_s,
        )

    def resubmit_all(self) -> None:
        for request in self.requests.values():
            if not request.over:
                self._submit(request)

    def on_delta(self, delta: TokenDelta, now_s: float) -> None:
        request = self.requests[(delta.request_id, delta.choice)]
        late = delta.attempt != request.attempt or request.cancelled
        if late or delta.first_index > len(request.tokens):
            return
        request.sign_s = now_s
        request.tokens += delta.tokens[len(request.tokens) - delta.first_index :]
        if delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) and not request.ends:
            request.ends.append(delta.finish_reason)
            ref = request.ref
            self._to_all_workers(lambda worker: worker.acknowledge(ref))

    def on_lost(self, lost: WorkerLost, now_s: float) -> None:
        for ref in lost.refs:
            request = self.requests[ref.key]
            if request.ref == ref and not request.over:
                request.attempt += 1
                request.sign_s = now_s
                self._submit(request)

    def on_prepared(self, prepared: MovePrepared, now_s: float) -> None:
        request = self.requests[prepared.ref.key]
        if request.ref == prepared.ref and not request.over:
            self._to_all_workers(lambda worker: worker.on_cancel(CancelSequence(ref=prepared.ref)))
            request.attempt += 1
            request.sign_s = now_s
            self._submit(request)

    def on_worker_reported(self, report: WorkerReported, now_s: float) -> None:
        for listed in report.sequences:
            if not listed.gateway_id:
                continue
            request = self.requests[listed.ref.key]
            if request.over or listed.ref.attempt < request.attempt:
                self._dismiss(report.worker_id, listed.ref)
            elif listed.ref.attempt == request.attempt:
                request.sign_s = now_s
                missed = listed.generated_tokens > len(request.tokens)
                if missed or listed.state is SequenceState.ENDED:
                    self._fetch(report.worker_id, request, now_s)

    def _dismiss(self, worker_id: str, ref: SequenceRef) -> None:
        def forget(worker: FakeWorker) -> None:
            worker.acknowledge(ref)
            worker.on_cancel(CancelSequence(ref=ref))

        self._to_worker(worker_id, forget)

    def _fetch(self, worker_id: str, request: Request, now_s: float) -> None:
        ref, first = request.ref, len(request.tokens)

        def answer(worker: FakeWorker) -> None:
            held = worker.held.get(ref.key)
            if held is not None and held.spec.ref == ref:
                tokens = tuple(held.tokens[held.spec.prompt_tokens + first :])
                delta = TokenDelta(ref.request_id, ref.choice, ref.attempt, first, tokens, held.reason)
                self.on_delta(delta, now_s)

        self._to_worker(worker_id, answer)

    def audit(self, now_s: float) -> None:
        """Sequences without a sign of life are submitted again, as the same attempt."""
        for request in self.requests.values():
            if not request.over and now_s - request.sign_s > FRAME_TIMEOUT_S:
                request.sign_s = now_s
                self._submit(request)
