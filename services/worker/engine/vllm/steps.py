"""Runs steps of a vLLM model runner, in the runner's process; see `runner.py`.

A step is a `SchedulerOutput` made here, and Kvasir's sampler replaces vLLM's. `StepsV1` and `steps_v2.py`
have the differences between runner V1 and V2."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from services.worker.engine.sampler import Logits
from services.worker.engine.vllm.draw import StepDraw
from services.worker.engine.vllm.requests import ContinuedRequest, NewRequest, StepRequests
from services.worker.engine.vllm.versions import check_object, has, part, require
from shared.errors import ConfigError, InternalError


def as_it_lies(kv: torch.Tensor) -> torch.Tensor:
    """Return a layer's KV `[blocks, heads, tokens, content]` with its dimensions in memory order.

    Raises ConfigError unless blocks are contiguous and in order."""
    strides = kv.stride()
    order = sorted(range(kv.dim()), key=lambda axis: (-strides[axis], axis))
    told = kv.permute(order)
    if order[0] != 0 or not told.is_contiguous():
        raise ConfigError(
            f"this vLLM's KV, {tuple(kv.shape)} with strides {strides}, does not lie block behind block "
            "within a layer: set VLLM_KV_CACHE_LAYOUT=LBNHC (NHD before 0.29), or another attention backend",
            param="engine",
        )
    return told


class KvPart(NamedTuple):
    """The KV of one layer on one rank, in a file in shared memory."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def mapped(self) -> torch.Tensor:
        """Return the memory mapped into this process; the file is created if necessary."""
        size = math.prod(self.shape)
        return torch.from_file(self.file, shared=True, size=size, dtype=self.dtype).view(self.shape)


class Steps(ABC):
    """Runs steps of the model runner of one of vLLM's workers, and replaces its sampler."""

    kind: ClassVar[str]
    """Which of vLLM's model runners it is for."""

    def __init__(self, worker: Any, adapters: Mapping[str, Any]) -> None:
        """Raises ConfigError if the runner lacks an attribute or the model needs several block tables."""
        runner = worker.model_runner
        check_object(runner, "runner", self.kind)
        check_groups(runner.kv_cache_config.kv_cache_groups)
        self._worker, self._runner, self._config = worker, runner, worker.vllm_config
        self._adapters = adapters
        """vLLM's `LoRARequest` by name."""
        self._greedy = part("SamplingParams")(temperature=0.0, max_tokens=1 << 30)
        self._draw: StepDraw | None = None
        self._hidden: torch.Tensor | None = None
        is_cuda = runner.device.type == "cuda"
        self._stream: Any = torch.cuda.current_stream(runner.device) if is_cuda else None
        """The stream on which vLLM captured its graphs, also for a thread that comes later."""
        self._take_the_sampler()

    @property
    def kv(self) -> list[torch.Tensor]:
        """KV of each layer, in memory order."""
        return [as_it_lies(each) for each in self._runner.kv_caches]

    @property
    def layout(self) -> str:
        """Name of a block's memory layout: the backend's order and, on a CPU, its instruction set."""
        layers = part("get_layers_from_vllm_config")(self._config, part("Attention"))
        kinds = {(type(each.impl).__name__, str(getattr(each, "isa", ""))) for each in layers.values()}
        order = self._config.cache_config.kv_cache_layout if has("CacheConfig", "kv_cache_layout") else ""
        return f"vllm {order} {sorted(kinds)} {[tuple(each.shape[1:]) for each in self.kv]}"

    def share(self, folder: str, rank: int) -> list[KvPart]:
        """Move the KV to files in `folder` that other processes can map. Call before the first step."""
        parts = []
        for layer, kv in enumerate(self._runner.kv_caches):
            told = as_it_lies(kv)
            part = KvPart(f"{folder}/{rank}-{layer}", tuple(told.shape), told.dtype)
            there = part.mapped()
            kv.set_(there.untyped_storage(), 0, kv.shape, kv.stride())  # in place: layers hold this tensor
            parts.append(part)
        return parts

    def compute(self, step: StepRequests) -> None:
        """Compute a step up to its logits; `sample` is next. On a GPU neither waits for the device."""
        common = (
            {"num_common_prefix_blocks": [0]} if has("SchedulerOutput", "num_common_prefix_blocks") else {}
        )
        scheduled = part("SchedulerOutput")(
            scheduled_new_reqs=[self._new(each) for each in step.new],
            scheduled_cached_reqs=self._continued(step.continued),
            num_scheduled_tokens=step.counts,
            total_num_scheduled_tokens=sum(step.counts.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=step.finished,
            free_encoder_mm_hashes=[],
            **common,
        )
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)  # this, and the device, are per thread
        self._half(self._worker.execute_model, scheduled)

    def sample(self, draw: StepDraw) -> None:
        """Sample the computed step. Its tokens go to the next one on the device."""
        state = self._runner.execute_model_state
        if state is None:
            raise InternalError("the step failed before it was sampled")
        self._draw, self._hidden = draw, self._sampled_from(state) if draw.embeds else None
        self._half(self._worker.sample_tokens, None)

    def _half(self, half: Callable[[Any], Any], argument: Any) -> None:
        """Run half of a step."""
        try:
            half(argument)
        except BaseException:
            self._runner.execute_model_state = None  # else vLLM refuses every later step
            raise

    @abstractmethod
    def _take_the_sampler(self) -> None:
        """Replace vLLM's sampler by `_drawn`."""

    @abstractmethod
    def _sampled_from(self, state: Any) -> torch.Tensor:
        """Return the head's input `[requests, hidden size]` from the state after `execute`."""

    def _new(self, request: NewRequest) -> Any:
        return part("NewRequestData")(
            req_id=request.name,
            mm_features=[],
            sampling_params=self._greedy,
            pooling_params=None,
            block_ids=(request.blocks,),
            num_computed_tokens=request.computed,
            lora_request=self._adapters[request.adapter] if request.adapter else None,
            **self._tokens(request),
        )

    @abstractmethod
    def _tokens(self, request: NewRequest) -> dict[str, Any]:
        """Return the request's tokens as arguments of `NewRequestData`."""

    def _continued(self, requests: Sequence[ContinuedRequest]) -> Any:
        return part("CachedRequestData")(
            req_ids=[each.name for each in requests],
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[(each.more_blocks,) if each.more_blocks else None for each in requests],
            num_computed_tokens=[each.computed for each in requests],
            num_output_tokens=[each.outputs for each in requests],
        )

    def _drawn(self, logits: torch.Tensor, names: Sequence[str], dtype: torch.dtype) -> torch.Tensor:
        """Return sampled tokens `[requests, 1]`."""
        draw, self._draw = self._draw, None
        require(draw is not None, "the sampler is called in a step")
        assert draw is not None
        return draw(Logits(logits, hidden=self._hidden), names).to(dtype).unsqueeze(1)


class StepsV1(Steps):
    """Steps of vLLM's model runner V1, whose sampler is replaced."""

    kind = "v1"

    def _take_the_sampler(self) -> None:
        self._runner.sampler = self._sampled

    def _sampled_from(self, state: Any) -> torch.Tensor:
        hidden: torch.Tensor = state.sample_hidden_states
        return hidden

    def _tokens(self, request: NewRequest) -> dict[str, Any]:
        return {"prompt_token_ids": request.tokens}

    def _sampled(self, logits: torch.Tensor, sampling_metadata: Any = None, **_: Any) -> Any:
        """Sample in place of vLLM's `Sampler`."""
        noted = self._drawn(logits, self._runner.input_batch.req_ids, torch.int32)
        return part("SamplerOutput", self.kind)(sampled_token_ids=noted, logprobs_tensors=None)


def check_groups(groups: Sequence[Any]) -> None:
    """Raise ConfigError unless all layers are attention and share one block table."""
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if len(groups) != 1 or "Attention" not in kinds[0]:
        raise ConfigError(
            f"this model keeps {', '.join(kinds) or 'no KV'}, and Kvasir has one table of blocks for a "
            "sequence: choose a model whose layers are all attention",
            param="model",
        )
