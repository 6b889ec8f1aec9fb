"""One step of a model runner of vLLM 0.32, in the process where the runner is; see `runner.py`.

A step is a `SchedulerOutput` of our own; the sampler is ours, in place of vLLM's. What the runners V1 and V2
do not have in common is in `steps_v1.py` and `steps_v2.py`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from services.worker.engine.logits import Logits
from services.worker.engine.vllm.requests import ContinuedRequest, NewRequest
from services.worker.engine.vllm.seam import Draw, require
from shared.errors import ConfigError

_USED_FIELDS = {
    "NewRequestData": "req_id prompt_token_ids mm_features sampling_params pooling_params block_ids "
    "num_computed_tokens lora_request",
    "CachedRequestData": "req_ids resumed_req_ids new_token_ids all_token_ids new_block_ids "
    "num_computed_tokens num_output_tokens",
    "SchedulerOutput": "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens "
    "total_num_scheduled_tokens scheduled_spec_decode_tokens scheduled_encoder_inputs finished_req_ids "
    "free_encoder_mm_hashes",
}


def check_fields() -> None:
    """Raises ConfigError where a step is told in another way than here."""
    from vllm.v1.core.sched import output

    for name, used in _USED_FIELDS.items():
        require_fields(output, name, used)


def require_fields(module: Any, name: str, used: str) -> None:
    """Of a dataclass or named tuple. Raises ConfigError for one that is missing, or all of it."""
    kind = getattr(module, name, None)
    there = set(getattr(kind, "_fields", ()))
    if kind is not None and is_dataclass(kind):
        there = {each.name for each in fields(kind)}
    missing = set(used.split()) - there
    require(not missing, f"{name} has {used}", f"no {', '.join(sorted(missing))}")


def require_names(thing: Any, used: Sequence[str]) -> None:
    """Raises ConfigError for an attribute that is missing."""
    for name in used:
        require(hasattr(thing, name), f"{type(thing).__name__} has {name}")


def as_it_lies(kv: torch.Tensor) -> torch.Tensor:
    """A layer's KV, which vLLM tells as `[blocks, heads, tokens, content]`, in the order of its memory.

    Raises ConfigError where a block's bytes do not lie in one piece, or blocks not behind each other.
    """
    strides = kv.stride()
    order = sorted(range(kv.dim()), key=lambda axis: (-strides[axis], axis))
    told = kv.permute(order)
    if order[0] != 0 or not told.is_contiguous():
        raise ConfigError(
            f"this vLLM's KV, {tuple(kv.shape)} with strides {strides}, does not lie block behind block "
            "within a layer: set VLLM_KV_CACHE_LAYOUT=LBNHC (or LBHNC), or another attention backend",
            param="engine",
        )
    return told


class KvPart(NamedTuple):
    """The KV of one layer on one rank, in a file that is memory."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def mapped(self) -> torch.Tensor:
        """The same memory in this process; made where it is not there yet."""
        return torch.from_file(self.file, shared=True, size=math.prod(self.shape), dtype=self.dtype).view(
            self.shape
        )


class Steps(ABC):
    """Of one model runner, whose sampler it becomes. `execute` and `sample` are the two halves of a step."""

    used: ClassVar[tuple[str, ...]] = (
        "device", "sampler", "kv_caches", "execute_model_state", "kv_cache_config",
    )  # fmt: skip
    """Names of the runner's."""

    def __init__(
        self, runner: Any, config: Any, execute: Callable[[Any], Any], sample: Callable[[None], Any]
    ) -> None:
        """Raises ConfigError where the runner has not what is used here, and for a model that it cannot have
        in one table of blocks."""
        from vllm import SamplingParams
        from vllm.v1.core.sched import output

        require_names(runner, self.used)
        check_groups(runner.kv_cache_config.kv_cache_groups)
        self._runner, self._config, self._execute, self._sample = runner, config, execute, sample
        self._output = output
        self._greedy = SamplingParams(temperature=0.0, max_tokens=1 << 30)
        self._draw: Draw | None = None
        self._hidden: torch.Tensor | None = None
        self._take_the_sampler()

    @property
    def kv(self) -> list[torch.Tensor]:
        """By layer, each as it lies."""
        return [as_it_lies(each) for each in self._runner.kv_caches]

    @property
    def layout(self) -> str:
        """How a block's bytes lie: the backend's order and, on the CPU, the instruction set it packs for."""
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention import Attention

        layers = get_layers_from_vllm_config(self._config, Attention)
        kinds = {(type(each.impl).__name__, str(getattr(each, "isa", ""))) for each in layers.values()}
        order = getattr(self._config.cache_config, "kv_cache_layout", "")
        return f"vllm {order} {sorted(kinds)} {[tuple(each.shape[1:]) for each in self.kv]}"

    def share(self, folder: str, rank: int) -> list[KvPart]:
        """Moves the KV into files of `folder`, which other processes can map. Before the first step."""
        parts = []
        for layer, kv in enumerate(self._runner.kv_caches):
            told = as_it_lies(kv)
            part = KvPart(f"{folder}/{rank}-{layer}", tuple(told.shape), told.dtype)
            there = part.mapped()
            kv.set_(there.untyped_storage(), 0, kv.shape, kv.stride())  # the layers have this tensor
            parts.append(part)
        return parts

    def run(
        self,
        new: Sequence[NewRequest],
        continued: Sequence[ContinuedRequest],
        counts: Mapping[str, int],
        finished: set[str],
        draw: Draw,
    ) -> None:
        """See `ModelRunner.run`."""
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
        if self._runner.device.type == "cuda":
            torch.cuda.set_device(self._runner.device)  # of this thread, which may be another than at start
        self._draw = draw
        try:
            if self._execute(scheduled) is None:
                self._hidden = self._sampled_from(self._runner.execute_model_state)
                self._sample(None)
        except BaseException:
            self._runner.execute_model_state = None  # else every later step is refused
            raise
        finally:
            self._draw = self._hidden = None

    @abstractmethod
    def _take_the_sampler(self) -> None:
        """Put `_drawn` in the place of vLLM's sampler."""

    @abstractmethod
    def _sampled_from(self, state: Any) -> torch.Tensor:
        """Of what the first half left: the hidden states `[requests, hidden size]` that logits are of."""

    def _new(self, request: NewRequest) -> Any:
        return self._output.NewRequestData(
            req_id=request.name,
            mm_features=[],
            sampling_params=self._greedy,
            pooling_params=None,
            block_ids=(request.blocks,),
            num_computed_tokens=request.computed,
            lora_request=None,
            **self._tokens(request),
        )

    @abstractmethod
    def _tokens(self, request: NewRequest) -> dict[str, Any]:
        """How this runner wants to be told them."""

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

    def _drawn(self, logits: torch.Tensor, names: Sequence[str], dtype: torch.dtype) -> torch.Tensor:
        """A token for each, `[requests, 1]`."""
        require(self._draw is not None, "the sampler is called in a step")
        assert self._draw is not None
        tokens = self._draw(Logits(logits, hidden=self._hidden), names)
        return torch.tensor(tokens, dtype=dtype, device=logits.device).unsqueeze(1)


def check_groups(groups: Sequence[Any]) -> None:
    """Of layers that share a table of blocks. Raises ConfigError for several of them, and for states."""
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if len(groups) != 1 or "Attention" not in kinds[0]:
        raise ConfigError(
            f"this model keeps {', '.join(kinds) or 'no KV'}, and Kvasir has one table of blocks for a "
            "sequence: choose a model whose layers are all attention",
            param="model",
        )
