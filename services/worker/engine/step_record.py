"""Records steps, prefix cache hits and waits for stored blocks in the worker's flight recorder.

All calls are on the engine's thread.
"""

from collections.abc import Collection

from services.worker.core.plans import StepWork
from services.worker.core.steps import StepEffects
from services.worker.engine.step_spans import StepSpans
from shared import spans
from shared.messages.sequence import SequenceKey
from shared.recorder import Batch, Recorder


class StepRecord:
    """Recorder of one worker's steps.

    Each step records the engine's busy time before it. The time between two steps of a sequence then divides
    into other sequences' steps and waiting.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._busy_s = 0.0
        """Seconds that the engine has computed since the start."""
        self._spans = StepSpans(recorder.instance) if spans.is_on() else None
        self._waiting: set[SequenceKey] = set()
        """Sequences that wait for stored blocks."""

    def found(self, work: StepWork) -> None:
        """Record the prefix cache hits of a step."""
        for hit in work.hits:
            ref, (device, host, disk) = hit.ref, hit.blocks
            self._recorder.note(
                "found",
                ref.request_id,
                choice=ref.choice,
                attempt=ref.attempt,
                tokens=hit.cached_tokens,
                device_blocks=device,
                host_blocks=host,
                disk_blocks=disk,
                peer_blocks=hit.peer_blocks,
            )

    def ran(
        self, work: StepWork, began_s: float, step_s: float, effects: StepEffects, remote_s: float = 0.0
    ) -> None:
        """Record a computed step and its effects; `remote_s`: seconds of it spent waiting for creditors."""
        plan = work.queued.plan
        chunks = []
        decodes = []
        for item in work.items:
            if item.is_decode:
                decodes.append(item.sequence.ref)
            else:
                chunks.append((item.sequence.ref, item.first_token, item.end_token))
        fields = {
            "step_s": step_s,
            "busy_s": self._busy_s,
            "plan": plan.seq,
            "epoch": plan.epoch,
            "heard_s": work.queued.received_s,
        }
        if remote_s > 0.0:
            fields["remote_s"] = remote_s
        if effects.stepped:
            fields["free_blocks"] = effects.stepped[-1].free_blocks
        self._busy_s += step_s
        if self._spans is not None:
            self._spans.ran(work, began_s, step_s)
        self._recorder.file(began_s, "step", Batch(chunks, decodes, fields))

    def said(self, effects: StepEffects, now_s: float) -> None:
        """Record the sequences that ended in `effects`."""
        for stepped in effects.stepped:
            for ended in stepped.ended:
                self._recorder.note_at(
                    now_s,
                    "ended",
                    ended.ref.request_id,
                    choice=ended.ref.choice,
                    attempt=ended.ref.attempt,
                    reason=str(ended.finish_reason),
                    generated_tokens=ended.generated_tokens,
                )
                if self._spans is not None:
                    self._spans.ended(ended)

    def waits(self, put_off: Collection[SequenceKey], now_s: float) -> None:
        """Record which sequences begin or stop waiting for stored blocks."""
        if not put_off and not self._waiting:
            return
        present = set(put_off)
        for key in present - self._waiting:
            self._recorder.note_at(now_s, "waits for blocks", key[0], choice=key[1])
        for key in self._waiting - present:
            self._recorder.note_at(now_s, "has blocks", key[0], choice=key[1])
        self._waiting = present
