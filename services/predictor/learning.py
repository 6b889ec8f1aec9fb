"""Background training: keeps served answers on disk and trains in a child process.

After every `every_samples` new answers a child process with low priority and a deadline trains on the older
ones. It compares old and new version on the latest. A better version replaces the old one between two
predictions; any other outcome changes nothing. Predictions never wait for this.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.predictor.core.length_model import LengthSample
from services.predictor.samples import read_samples, write_samples
from shared.errors import KvasirError
from shared.log import canonical, get_logger

if TYPE_CHECKING:  # imports torch, which the other models do not need
    from services.predictor.models.regressor import RegressorModel

_ROOT = Path(__file__).parents[2]
_DEADLINE_S = 900.0
_KILL_GRACE_S = 30.0
_MOST_OUTPUT_BYTES = 65_536
SAMPLES_FILE = "served.jsonl"

_log = get_logger("predictor")


@dataclass
class Learner:
    """Keeps finished answers on disk and trains a regressor on them in a child process. It changes the model
    in the model's thread only, so never during a prediction."""

    model: "RegressorModel"
    call: Callable[[Callable[[], None]], None]
    """`Batcher.call`."""
    directory: Path
    every_samples: int = 1000
    """New answers between two trainings."""
    min_samples: int = 300
    history_samples: int = 20_000
    """Latest answers that are learned from."""
    trainings: int = 0
    swaps: int = 0
    failures: int = 0
    is_training: bool = False
    last_verdict: dict[str, Any] = field(default_factory=dict)
    _fresh: int = 0
    _due: asyncio.Event = field(default_factory=asyncio.Event)
    _history: deque[LengthSample] = field(init=False)

    def __post_init__(self) -> None:
        self._history = deque(self._remembered(), maxlen=self.history_samples)

    def observe(self, sample: LengthSample) -> None:
        self._history.append(sample)
        self._fresh += 1
        if self._fresh >= self.every_samples and len(self._history) >= self.min_samples:
            self._due.set()

    async def run(self) -> None:
        """Train when due, until cancelled; then save the history and stop a running training."""
        try:
            while True:
                await self._due.wait()
                self._due.clear()
                self._fresh = 0
                await self._learn()
        finally:
            if self._fresh:
                with contextlib.suppress(OSError):
                    write_samples(self.directory / SAMPLES_FILE, self._history)

    def summary(self) -> dict[str, Any]:
        """Return the fields for `status`."""
        maes = {f"{side}_mae_tokens": mae for side, mae in _maes(self.last_verdict).items()}
        return {
            "learned_from": len(self._history),
            "trainings": self.trainings,
            "swaps": self.swaps,
            "failed_trainings": self.failures,
            "training": self.is_training,
            **maes,
        }

    def _remembered(self) -> list[LengthSample]:
        """Return the history of an earlier run. An unreadable file is ignored."""
        self.directory.mkdir(parents=True, exist_ok=True)
        try:
            return read_samples(self.directory / SAMPLES_FILE)
        except KvasirError:
            return []

    async def _learn(self) -> None:
        self.trainings += 1
        self.is_training = True
        try:
            await asyncio.to_thread(write_samples, self.directory / SAMPLES_FILE, list(self._history))
            self.last_verdict = verdict = await self._train()
            written = verdict.get("written")
            if written:
                from services.predictor.models import regressor

                trained = await asyncio.to_thread(regressor.read, self.directory / written)
                self.call(lambda: self.model.adopt(trained))
                self.swaps += 1
            maes = {f"{side}_mae": mae for side, mae in _maes(verdict).items()}
            canonical(_log, "length model trained", swapped=bool(written), **maes)
        except (OSError, ValueError, KvasirError, TimeoutError) as error:
            self.failures += 1
            _log.warning("length model not trained: %s", error)
        finally:
            self.is_training = False

    async def _train(self) -> dict[str, Any]:
        """Run one training and return its verdict. Raises TimeoutError, OSError, ValueError."""
        command = [sys.executable, "-m", "services.predictor", "train", "--json", "--only-if-better"]
        command += ["--data", str((self.directory / SAMPLES_FILE).resolve())]
        command += ["--out", str(self.directory.resolve()), "--background", str(os.getpid())]
        command += ["--deadline-s", str(_DEADLINE_S), "--seed", str(self.trainings)]
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(*command, cwd=_ROOT, stdout=pipe, stderr=pipe)
        try:
            async with asyncio.timeout(_DEADLINE_S + _KILL_GRACE_S):
                output, problems = await child.communicate()
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        if child.returncode != 0:
            lines = problems[-_MOST_OUTPUT_BYTES:].decode(errors="replace").strip().splitlines()
            raise ValueError(lines[-1] if lines else f"exit code {child.returncode}")
        verdict: dict[str, Any] = json.loads(output)
        return verdict


def _maes(verdict: dict[str, Any]) -> dict[str, float]:
    return {side: verdict[side]["mae_tokens"] for side in ("old", "new") if verdict.get(side)}
