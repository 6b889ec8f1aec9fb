"""What Kvasir has in each process of a model that is cut in parts: vLLM mixes it into its worker class.

Every rank has all logits and draws the same tokens from them: what is drawn depends on nothing else.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.worker.core.sampling import Sampled
from services.worker.engine.vllm.requests import ContinuedRequest, NewRequest
from services.worker.engine.vllm.seam import Draw
from services.worker.engine.vllm.steps import KvPart, Steps
from services.worker.engine.vllm.steps_v1 import StepsV1
from services.worker.engine.vllm.steps_v2 import StepsV2

_SHARED = Path("/dev/shm")


def open_steps(
    runner: Any, config: Any, execute: Callable[[Any], Any], sample: Callable[[None], Any]
) -> Steps:
    """Of whichever runner vLLM has made. Raises ConfigError as `Steps` does."""
    kind = StepsV2 if config.use_v2_model_runner else StepsV1
    return kind(runner, config, execute, sample)


class KvasirRank:
    """Called by name through vLLM's executor, on all ranks at once."""

    kvasir_steps: Steps

    def kvasir_open(self) -> str:
        """Its layout; to be called first."""
        worker: Any = self
        self.kvasir_steps = open_steps(
            worker.model_runner, worker.vllm_config, worker.execute_model, worker.sample_tokens
        )
        return self.kvasir_steps.layout

    def kvasir_share(self, folder: str) -> list[KvPart]:
        """See `Steps.share`. vLLM's own shared memory, which all ranks have by now, loses its name: it would
        outlive a rank that is killed."""
        worker: Any = self
        for left in _SHARED.glob(f"{os.environ['VLLM_DIST_IDENT']}*_{worker.rank}"):
            left.unlink(missing_ok=True)
        return self.kvasir_steps.share(folder, worker.rank)

    def kvasir_step(
        self,
        new: Sequence[NewRequest],
        continued: Sequence[ContinuedRequest],
        counts: Mapping[str, int],
        finished: set[str],
        draw: Draw,
    ) -> dict[str, Sampled | None]:
        """One iteration; what was drawn."""
        self.kvasir_steps.run(new, continued, counts, finished, draw)
        return draw.drawn
