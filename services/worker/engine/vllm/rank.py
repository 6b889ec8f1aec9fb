"""Extension of vLLM's worker class, for each rank of a tensor-parallel model.

Every rank has all logits and samples the same tokens from them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.worker.core.sampling import Sampled
from services.worker.engine.vllm.draw import StepDraw
from services.worker.engine.vllm.requests import StepRequests
from services.worker.engine.vllm.steps import KvPart, Steps, StepsV1
from services.worker.engine.vllm.steps_v2 import StepsV2

_SHARED = Path("/dev/shm")


def open_steps(
    runner: Any, config: Any, execute: Callable[[Any], Any], sample: Callable[[None], Any]
) -> Steps:
    """Return the `Steps` for vLLM's model runner. Raises ConfigError as `Steps` does."""
    kind = StepsV2 if config.use_v2_model_runner else StepsV1
    return kind(runner, config, execute, sample)


class KvasirRank:
    """Methods that vLLM's executor calls by name, on all ranks."""

    kvasir_steps: Steps

    def kvasir_open(self) -> str:
        """Prepare the rank and return its KV layout. Call this first."""
        worker: Any = self
        self.kvasir_steps = open_steps(
            worker.model_runner, worker.vllm_config, worker.execute_model, worker.sample_tokens
        )
        return self.kvasir_steps.layout

    def kvasir_share(self, folder: str) -> list[KvPart]:
        """See `Steps.share`. Also unlinks vLLM's shared memory, which would outlive a killed rank."""
        worker: Any = self
        for left in _SHARED.glob(f"{os.environ['VLLM_DIST_IDENT']}*_{worker.rank}"):
            left.unlink(missing_ok=True)
        return self.kvasir_steps.share(folder, worker.rank)

    def kvasir_step(self, step: StepRequests, draw: StepDraw) -> dict[str, Sampled | None]:
        """Run one step and return the sampled tokens by request name."""
        self.kvasir_steps.run(step, draw)
        return draw.drawn
