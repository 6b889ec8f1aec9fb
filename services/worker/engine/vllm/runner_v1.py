"""Everything that is private to vLLM 0.32 and its model runner V1; see `seam.py`.

`EngineCore` makes executor, KV tensors and warm-up in their order; its scheduler is made, too, and never
asked. A step is a `SchedulerOutput` of our own, given to the executor, whose sampler is ours.
"""

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch

from services.worker.engine.logits import Logits
from services.worker.engine.settings import VllmConfig
from services.worker.engine.vllm.requests import NULL_BLOCKS, ContinuedRequest, NewRequest
from services.worker.engine.vllm.seam import Draw, require
from shared.errors import ConfigError

VERSION = "0.32."
"""What the version begins with."""
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model runner lives in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_CHECKED_OVERHEAD_BYTES = 1 << 20
"""With a number of blocks vLLM allocates those, whatever it is told of memory; this passes its checks."""
_USED_FIELDS = {
    "NewRequestData": "req_id prompt_token_ids mm_features sampling_params pooling_params block_ids "
    "num_computed_tokens lora_request",
    "CachedRequestData": "req_ids resumed_req_ids new_token_ids all_token_ids new_block_ids "
    "num_computed_tokens num_output_tokens",
    "SchedulerOutput": "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens "
    "total_num_scheduled_tokens scheduled_spec_decode_tokens scheduled_encoder_inputs finished_req_ids "
    "free_encoder_mm_hashes",
}


class RunnerV1:
    """A `ModelRunner`."""

    def __init__(
        self,
        model: str,
        *,
        revision: str | None,
        dtype: str,
        block_tokens: int,
        kv_blocks: int,
        kv_bytes: int,
        settings: VllmConfig,
    ) -> None:
        """With `kv_blocks` 0 as many blocks as `kv_bytes` hold, with neither as many as there is memory for.

        Raises ConfigError where this vLLM is another, and for a model that it cannot have in one table of
        blocks.
        """
        os.environ.update(_ENVIRONMENT)
        import vllm
        from vllm import SamplingParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.core.sched import output
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor
        from vllm.v1.outputs import SamplerOutput

        self.version: str = vllm.__version__
        require(self.version.startswith(VERSION), f"written for {VERSION}x", self.version)
        for name, used in _USED_FIELDS.items():
            there = (
                {each.name for each in fields(getattr(output, name, VllmConfig))}
                if hasattr(output, name)
                else set()
            )
            missing = set(used.split()) - there
            require(not missing, f"{name} has {used}", f"no {', '.join(sorted(missing))}")
        self._output, self._sampler_output = output, SamplerOutput
        arguments = EngineArgs(
            model=model,
            revision=revision,
            dtype=dtype,
            block_size=block_tokens,
            num_gpu_blocks_override=kv_blocks + NULL_BLOCKS if kv_blocks else None,
            kv_cache_memory_bytes=_CHECKED_OVERHEAD_BYTES if kv_blocks else kv_bytes or None,
            max_model_len=-1,  # as long as there is KV for
            max_num_seqs=settings.max_rows,
            max_num_batched_tokens=settings.max_step_tokens,
            enable_prefix_caching=False,
            async_scheduling=False,  # else a step's tokens come a step later
            disable_hybrid_kv_cache_manager=True,  # layers with windows share the others' table
            enforce_eager=settings.eager,
            disable_log_stats=True,
            use_tqdm_on_load=False,
        )
        try:
            self._config = arguments.create_engine_config()
            self._core = EngineCore(self._config, Executor.get_class(self._config), log_stats=False)
        except (ValueError, NotImplementedError, OSError) as error:
            raise ConfigError(f"vLLM cannot serve {model}: {_first_line(error)}", param="model") from error
        random.seed()  # vLLM has given every worker the same
        self._executor = self._core.model_executor
        self._runner: Any = self._executor.driver_worker.worker.model_runner
        self._check(kv_blocks)
        self._greedy = SamplingParams(temperature=0.0, max_tokens=1 << 30)
        self._draw: Draw | None = None
        self._hidden: torch.Tensor | None = None
        self._runner.sampler = self._sampled

    def _check(self, kv_blocks: int) -> None:
        runner = self._runner
        for name in ("sampler", "input_batch", "kv_caches", "execute_model_state", "kv_cache_config"):
            require(hasattr(runner, name), f"{type(runner).__name__} has {name}")
        groups = runner.kv_cache_config.kv_cache_groups
        kinds = [type(group.kv_cache_spec).__name__ for group in groups]
        if len(groups) != 1 or "Attention" not in kinds[0]:
            raise ConfigError(
                f"this model keeps {', '.join(kinds) or 'no KV'}, and Kvasir has one table of blocks for a "
                "sequence: choose a model whose layers are all attention",
                param="model",
            )
        shapes = {tuple(each.shape) for each in self.kv}
        require(bool(shapes), "KV is a list of tensors", type(runner.kv_caches).__name__)
        blocks = self._config.cache_config.num_gpu_blocks
        require(not kv_blocks or blocks == kv_blocks + NULL_BLOCKS, f"{kv_blocks} blocks and block 0", blocks)
        require(all(shape[0] == blocks for shape in shapes), "KV begins with the blocks", shapes)
        require(all(each.is_contiguous() for each in self.kv), "KV lies in one piece")

    @property
    def vocabulary(self) -> int:
        return int(self._config.model_config.get_vocab_size())

    @property
    def max_positions(self) -> int:
        return int(self._config.model_config.max_model_len) - 1  # asserted in _bookkeeping_sync

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._config.model_config.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        device: torch.device = self._runner.device
        return device

    @property
    def kv(self) -> Sequence[torch.Tensor]:
        return list(self._runner.kv_caches)

    @property
    def layout(self) -> str:
        """Backend and, on the CPU, the instruction set that it packs for."""
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention import Attention

        layers = get_layers_from_vllm_config(self._config, Attention)
        kinds = {(type(each.impl).__name__, str(getattr(each, "isa", ""))) for each in layers.values()}
        order = getattr(self._config.cache_config, "kv_cache_layout", "")
        return f"vllm {order} {sorted(kinds)} {[tuple(each.shape[1:]) for each in self.kv]}"

    def run(
        self,
        new: Sequence[NewRequest],
        continued: Sequence[ContinuedRequest],
        counts: Mapping[str, int],
        finished: set[str],
        draw: Draw,
    ) -> None:
        scheduled = self._output.SchedulerOutput(
            scheduled_new_reqs=[self._new(each) for each in new],
            scheduled_cached_reqs=self._continued(continued),
            num_scheduled_tokens=dict(counts),
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=finished,
            free_encoder_mm_hashes=[],
        )
        self._draw = draw
        try:
            if self._executor.execute_model(scheduled) is None:
                self._hidden = self._runner.execute_model_state.sample_hidden_states
                self._executor.sample_tokens(None)
        except BaseException:
            self._runner.execute_model_state = None  # else every later step is refused
            raise
        finally:
            self._draw = self._hidden = None

    def close(self) -> None:
        self._core.shutdown()

    def _new(self, request: NewRequest) -> Any:
        return self._output.NewRequestData(
            req_id=request.name,
            prompt_token_ids=request.tokens,
            mm_features=[],
            sampling_params=self._greedy,
            pooling_params=None,
            block_ids=(request.blocks,),
            num_computed_tokens=request.computed,
            lora_request=None,
        )

    def _continued(self, requests: Sequence[ContinuedRequest]) -> Any:
        return self._output.CachedRequestData(
            req_ids=[each.name for each in requests],
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[(each.more_blocks,) if each.more_blocks else None for each in requests],
            num_computed_tokens=[each.computed for each in requests],
            num_output_tokens=[each.outputs for each in requests],
        )

    def _sampled(self, logits: torch.Tensor, sampling_metadata: Any = None, **_: Any) -> Any:
        """In place of vLLM's `Sampler`."""
        require(self._draw is not None, "the sampler is called in a step")
        assert self._draw is not None
        tokens = self._draw(Logits(logits, hidden=self._hidden), self._runner.input_batch.req_ids)
        noted = torch.tensor(tokens, dtype=torch.int32, device=logits.device).unsqueeze(1)
        return self._sampler_output(sampled_token_ids=noted, logprobs_tensors=None)


def _first_line(error: Exception) -> str:
    """Of pydantic's errors the one that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next(
        (line for line in lines if line.startswith("Value error, ")), lines[0] if lines else repr(error)
    )
