"""Steps of vLLM's model runner V2, whose sampler is wrapped because the runner also uses its other methods.

The sampler, not the runner as in V1, returns how many tokens each request got: one, or none for an
unfinished prompt."""

from typing import Any

import torch

from services.worker.engine.vllm.requests import NewRequest
from services.worker.engine.vllm.seam import require
from services.worker.engine.vllm.steps import Steps, require_fields, require_names
from shared.errors import ConfigError

_USED_FIELDS = {
    "vllm.v1.worker.gpu.input_batch.InputBatch": "req_ids num_reqs idx_mapping seq_lens logits_indices",
    "vllm.v1.worker.gpu.model_runner.ExecuteModelState": "input_batch hidden_states",
    "vllm.v1.worker.gpu.sample.output.SamplerOutput": "sampled_token_ids logprobs_tensors num_nans "
    "num_sampled num_rejected",
    "vllm.v1.core.sched.output.NewRequestData": "prefill_token_ids",
}


def check_v2() -> None:
    """Raise ConfigError if V2 cannot run or has other fields. Called before a model is loaded."""
    from importlib import import_module

    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        raise ConfigError(
            "vLLM's model runner V2 needs a Triton for this device: set vllm.model_runner v1",
            param="vllm.model_runner",
        )
    for path, used in _USED_FIELDS.items():
        module, _, name = path.rpartition(".")
        require_fields(import_module(module), name, used)


class StepsV2(Steps):
    """See `Steps`."""

    def _take_the_sampler(self) -> None:
        runner = self._runner
        require_names(runner, ("req_states", "batch_sharder"))
        require_names(runner.req_states, ("prefill_len",))
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
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        noted = self._drawn(logits, batch.req_ids, torch.int64)
        ends = batch.seq_lens[: batch.num_reqs]
        prompts = self._runner.req_states.prefill_len.gpu[batch.idx_mapping]
        sampled = (ends >= prompts).to(torch.int32)
        return SamplerOutput(
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
