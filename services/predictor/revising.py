"""Runs `core/rest_learner.py`: takes hidden states, queues revised lengths, and saves the heads.

Heads are used in the model's thread only (`Batcher.call`), one learner per served model. If states
arrive faster than they are processed, the newest are dropped, because a late prediction is useless.
"""

import asyncio
import hashlib
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from services.predictor.core.rest_learner import Float32s, RestLearner
from services.predictor.samples import write_whole
from shared.log import get_logger
from shared.messages.commands import LengthPrediction
from shared.messages.lengths import AnswerState, RevisedLength, WorkerObserved
from shared.messages.sequence import SequenceKey

MOST_PENDING = 32
"""Maximum messages waiting for the thread, and maximum revisions waiting to be sent."""
MOST_MODELS = 8
SAVE_EVERY = 500
"""Answers between two saves."""
_FP16_BYTES = 2

_log = get_logger("predictor")


class Reviser:
    """Revises lengths from hidden states. Call it from the event loop; the publisher drains `revised`."""

    def __init__(
        self, call: Callable[[Callable[[], None]], None], kind: str, directory: Path | None = None
    ) -> None:
        """`call`: calls a function in the model's thread. `kind`: a name of `rest_learner.HEADS`. With a
        `directory`, heads persist across restarts."""
        self._call, self._kind, self._directory = call, kind, directory
        self._learners: dict[tuple[str, int], RestLearner] = {}
        self._pending = 0
        self._loop = asyncio.get_running_loop()
        self.revised: asyncio.Queue[tuple[RevisedLength, ...]] = asyncio.Queue(MOST_PENDING)
        self.dropped = 0
        """Number of dropped messages of states and revisions."""

    def observe(self, event: WorkerObserved) -> None:
        """Queue hidden states of running answers from one worker."""
        if self._pending >= MOST_PENDING:
            self.dropped += 1
            return
        self._pending += 1
        self._call(partial(self._observe, event))

    def finish(self, key: SequenceKey, output_tokens: int, *, censored: bool) -> None:
        """Learn from a finished answer, complete or `censored` by its limit."""
        self._call(partial(self._finish, key, output_tokens, censored))

    def forget(self, key: SequenceKey) -> None:
        """Drop an answer that ended for another reason."""
        self._call(partial(self._forget, key))

    def save(self) -> None:
        """Save all heads. Call it in the model's thread, or after that has ended."""
        for (model, width), learner in self._learners.items():
            self._save(model, width, learner)

    def summary(self) -> dict[str, Any]:
        """Return the fields for `status`."""
        shown = {f"revised {model}": learner.summary() for (model, _), learner in self._learners.items()}
        return {**shown, **({"states_dropped": self.dropped} if self.dropped else {})}

    # In the model's thread

    def _observe(self, event: WorkerObserved) -> None:
        revised: tuple[RevisedLength, ...] = ()
        try:
            widths = {len(one.state) // _FP16_BYTES for one in event.states}
            for width in sorted(widths - {0}):
                same = [one for one in event.states if len(one.state) == _FP16_BYTES * width]
                learner = self._learner(event.model, width)
                if learner is not None:
                    revised += _told(learner, same)
        finally:
            self._loop.call_soon_threadsafe(self._tell, revised)

    def _tell(self, revised: tuple[RevisedLength, ...]) -> None:
        self._pending -= 1
        if revised:
            try:
                self.revised.put_nowait(revised)
            except asyncio.QueueFull:
                self.dropped += 1

    def _finish(self, key: SequenceKey, output_tokens: int, censored: bool) -> None:
        for (model, width), learner in self._learners.items():
            before = learner.answers
            learner.finish(key, output_tokens, censored=censored)
            if learner.answers > before and learner.answers % SAVE_EVERY == 0:
                self._save(model, width, learner)

    def _forget(self, key: SequenceKey) -> None:
        for learner in self._learners.values():
            learner.forget(key)

    def _learner(self, model: str, width: int) -> RestLearner | None:
        """Return the learner of a model and state width; None beyond `MOST_MODELS`."""
        learner = self._learners.get((model, width))
        if learner is None and len(self._learners) < MOST_MODELS:
            learner = self._learners[model, width] = RestLearner(self._kind, width)
            self._load(model, width, learner)
        return learner

    def _file(self, model: str, width: int) -> Path | None:
        if self._directory is None:
            return None
        name = hashlib.blake2b(f"{self._kind}/{width}/{model}".encode(), digest_size=8).hexdigest()
        return self._directory / f"rest-{name}.npz"

    def _load(self, model: str, width: int, learner: RestLearner) -> None:
        """Load a saved head. An unreadable file is ignored."""
        path = self._file(model, width)
        if path is None or not path.exists():
            return
        try:
            with np.load(path, allow_pickle=False) as kept:
                learner.restore({name: kept[name] for name in kept.files})
        except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
            _log.warning("%s is left alone, and a new head begins: %s", path.name, error)

    def _save(self, model: str, width: int, learner: RestLearner) -> None:
        """Save a head atomically."""
        path = self._file(model, width)
        if path is None:
            return
        whole = io.BytesIO()
        np.savez(whole, **learner.weights())  # type: ignore[arg-type]  # numpy names no type for it
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, whole.getvalue())
        except OSError as error:
            _log.warning("what was learned of %s is not kept: %s", model, error)


def _told(learner: RestLearner, states: list[AnswerState]) -> tuple[RevisedLength, ...]:
    """Return predictions of running answers; none while the head is worse than the histogram."""
    packed: Float32s = np.stack([np.frombuffer(one.state, np.float16) for one in states]).astype(np.float32)
    counts = [(one.prompt_tokens, one.generated_tokens, max(1, one.max_tokens)) for one in states]
    told = learner.observe([one.ref.key for one in states], counts, packed)
    if not learner.is_better:
        return ()
    version = f"states-{learner.answers}"
    return tuple(
        RevisedLength(
            ref=one.ref,
            generated_tokens=one.generated_tokens,
            prediction=LengthPrediction(model_version=version, is_calibrated=True, **vars(each)),
        )
        for one, each in zip(states, told, strict=True)
    )
