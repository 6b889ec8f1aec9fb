"""One length model per served model, because answer lengths and token ids differ between models.

Each has its own state on disk. Length models that do not learn while serving are shared.
"""

import asyncio
import hashlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from services.predictor.batching import Batcher
from services.predictor.config import PredictorConfig
from services.predictor.core.report import PredictionAudit
from services.predictor.learning import Learner
from services.predictor.models import FIXED, create
from shared.clock import monotonic_s
from shared.log import canonical, get_logger

MOST_MODELS = 16
"""Maximum named models; further ones use the common length model."""
_REGRESSOR = "services.predictor.models.regressor"
_log = get_logger("predictor")


@dataclass
class ServedLengths:
    """Length model of one served model, its learner and its accuracy."""

    batcher: Batcher
    learner: Learner | None = None
    audit: PredictionAudit = field(default_factory=PredictionAudit)

    def summary(self) -> dict[str, Any]:
        """Return the fields for `status`."""
        return {
            "model_version": self.batcher.model.version,
            **self.audit.summary(),
            **({} if self.learner is None else self.learner.summary()),
        }


class ServedModels:
    """`ServedLengths` by served model, created when a message first names it. `run` must be running."""

    def __init__(self, config: PredictorConfig) -> None:
        """Create the common model. Raises ConfigError for an unknown length model."""
        self._config = config
        self._tasks: asyncio.TaskGroup | None = None
        self._is_over = False
        """Whether `run` has ended, so that no model is added."""
        self.common = self._made(config.state_dir)
        """For requests that name no model; the reviser shares its thread."""
        self._named: dict[str, ServedLengths] = {}

    async def run(self) -> None:
        """Run batchers and learners until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for lengths in {id(one.batcher): one for one in (self.common, *self._named.values())}.values():
                self._start(lengths)
            try:
                await asyncio.Event().wait()
            finally:
                self._is_over = True

    def of(self, name: str) -> ServedLengths:
        """Return the lengths of a served model; without a name the only one, else the common one."""
        if not name and len(self._named) == 1:
            (only,) = self._named.values()
            return only
        known = self._named.get(name)
        if known is not None or not name or self._is_over or len(self._named) >= MOST_MODELS:
            return known or self.common
        if self._config.model in FIXED:
            made = ServedLengths(self.common.batcher)
        else:
            directory = self._config.state_dir
            made = self._made(None if directory is None else directory / folder_of(name))
            self._start(made)
        self._named[name] = made
        canonical(_log, "lengths of a model", served=name, version=made.batcher.model.version)
        return made

    def summary(self) -> dict[str, Any]:
        """Return the fields for `status`: those of the only model, or sums with a row per model."""
        named = self._named or {"": self.common}
        batchers = {id(one.batcher): one.batcher for one in (self.common, *named.values())}
        shown = {name: one.summary() for name, one in named.items()}
        now_s = monotonic_s()
        return {
            "model": self.common.batcher.model.name,
            "trouble": next(filter(None, (each.faults.text(now_s) for each in batchers.values())), ""),
            "batches": sum(batcher.batches for batcher in batchers.values()),
            **(next(iter(shown.values())) if len(shown) == 1 else _together(shown)),
        }

    def _made(self, directory: Path | None) -> ServedLengths:
        """Create a length model from its own trained version, else from the one in `state_dir`."""
        config = self._config
        settings = config.model_settings()
        model = create(config.model, replace(settings, state_dir=directory))
        if directory is not None and directory != config.state_dir and _is_untrained(model):
            model = create(config.model, settings)
        batcher = Batcher(model, config.batch_limit, config.queue_limit)
        return ServedLengths(batcher, learner_for(config, batcher, directory))

    def _start(self, lengths: ServedLengths) -> None:
        if self._tasks is None:
            return  # `run` starts it.
        self._tasks.create_task(lengths.batcher.run())
        if lengths.learner is not None:
            self._tasks.create_task(lengths.learner.run())


def learner_for(config: PredictorConfig, batcher: Batcher, directory: Path | None) -> Learner | None:
    """Return a learner for a regressor with a directory, else None."""
    if directory is None or not config.learn or _REGRESSOR not in sys.modules:
        return None  # There is no regressor; importing it would load torch, which takes seconds.
    from services.predictor.models.regressor import RegressorModel

    if not isinstance(batcher.model, RegressorModel):
        return None
    return Learner(batcher.model, batcher, directory, config.learning_rules())


def folder_of(name: str) -> str:
    """Return a readable folder name, unique per model name."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:40]
    return f"{readable}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"


def _is_untrained(model: object) -> bool:
    return getattr(model, "trained", model) is None


def _together(shown: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    added = {
        name: sum(each.get(name, 0) for each in shown.values())
        for name in ("predictions", "finished", "scored")
    }
    return {**added, "models": [{"model": name, **each} for name, each in shown.items()]}
