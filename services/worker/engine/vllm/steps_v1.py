"""Steps of vLLM's model runner V1, whose sampler is replaced."""

from typing import Any

import torch

from services.worker.engine.vllm.requests import NewRequest
from services.worker.engine.vllm.steps import Steps, require_names


class StepsV1(Steps):
    """See `Steps`."""

    def _take_the_sampler(self) -> None:
        from vllm.v1.outputs import SamplerOutput

        require_names(self._runner, ("input_batch",))
        self._sampler_output = SamplerOutput
        self._runner.sampler = self._sampled

    def _sampled_from(self, state: Any) -> torch.Tensor:
        hidden: torch.Tensor = state.sample_hidden_states
        return hidden

    def _tokens(self, request: NewRequest) -> dict[str, Any]:
        return {"prompt_token_ids": request.tokens}

    def _sampled(self, logits: torch.Tensor, sampling_metadata: Any = None, **_: Any) -> Any:
        """Sample in place of vLLM's `Sampler`."""
        noted = self._drawn(logits, self._runner.input_batch.req_ids, torch.int32)
        return self._sampler_output(sampled_token_ids=noted, logprobs_tensors=None)
