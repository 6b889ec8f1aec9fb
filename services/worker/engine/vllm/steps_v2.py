"""Steps of vLLM's model runner V2, whose sampler is wrapped because the runner also uses its other methods.

The sampler, not the runner as in V1, returns how many tokens each request got: one, or none for an
unfinished prompt."""

from typing import Any

import torch

from services.worker.engine.vllm.requests import NewRequest
from services.worker.engine.vllm.steps import Steps
from services.worker.engine.vllm.versions import check_object, has, part, require
from shared.errors import ConfigError


def check_v2() -> None:
    """Raise ConfigError if V2 cannot run. Called before a model is loaded."""
    if not part("HAS_TRITON", "v2"):
        raise ConfigError(
            "vLLM's model runner V2 needs a Triton for this device: set vllm.model_runner v1",
            param="vllm.model_runner",
        )


class StepsV2(Steps):
    """See `Steps`."""

    kind = "v2"

    def _take_the_sampler(self) -> None:
        runner = self._runner
        check_object(runner.req_states, "req_states", self.kind)
        if has("runner", "batch_sharder", self.kind):
            require(runner.batch_sharder is None, "each rank samples all requests")
        runner.sampler = _Wrapped(runner.sampler, self)

    def _sampled_from(self, state: Any) -> torch.Tensor:
        hidden: torch.Tensor = state.hidden_states[state.input_batch.logits_indices]
        return hidden

    def _tokens(self, request: NewRequest) -> dict[str, Any]:
        tokens = request.tokens.tolist()  # V2 accepts lists only
        return {"prompt_token_ids": tokens, "prefill_token_ids": tokens}

    def sampled(self, logits: torch.Tensor, batch: Any) -> Any:
        """Return the output of the wrapped sampler."""
        noted = self._drawn(logits, batch.req_ids, torch.int64)
        ends = batch.seq_lens[: batch.num_reqs]
        prompts = self._runner.req_states.prefill_len.gpu[batch.idx_mapping]
        sampled = (ends >= prompts).to(torch.int32)
        return part("SamplerOutput", self.kind)(
            sampled_token_ids=noted,
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=sampled,
            num_rejected=torch.zeros_like(sampled),
        )


class _Wrapped:
    """vLLM's `Sampler` with Kvasir's sampling."""

    def __init__(self, sampler: Any, steps: StepsV2) -> None:
        self._sampler, self._steps = sampler, steps

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> Any:
        return self._steps.sampled(logits, input_batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)
