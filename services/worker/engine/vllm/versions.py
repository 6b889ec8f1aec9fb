"""Table of what Kvasir uses of vLLM that is private, and in which versions it lies where.

Only this module imports vLLM; a difference between versions is a row here and a line that asks `has`."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

from shared.errors import ConfigError
from shared.log import get_logger

Version = tuple[int, int]
OLDEST, NEWEST = (0, 26), (0, 32)
"""The versions whose names are below, all tested. A newer one is tried if it has all names."""
_LATER = (1 << 30, 0)
_log = get_logger("worker.vllm")


class Private(NamedTuple):
    """A name in a module of vLLM, or an object (no module) that exists once a model is loaded."""

    name: str
    module: str
    members: str = ""
    """Fields, parameters or attributes that are used."""
    since: Version = OLDEST
    until: Version = _LATER
    """Last version."""
    runner: str = ""
    """Model runner that needs it; empty: both."""


_OUTPUT, _V2 = "vllm.v1.core.sched.output", "vllm.v1.worker.gpu"
TABLE = (
    Private("SamplingParams", "vllm"),
    Private("current_platform", "vllm.platforms", "device_type"),
    Private("EngineCore", "vllm.v1.engine.core", "add_lora shutdown"),
    Private("LoRARequest", "vllm.lora.request", "lora_name lora_int_id lora_path"),
    Private("Executor", "vllm.v1.executor", "get_class collective_rpc"),
    Private("WorkerBase", "vllm.v1.worker.worker_base", "execute_model sample_tokens"),
    Private("SchedulerConfig", "vllm.config", "async_scheduling"),
    Private("ModelConfig", "vllm.config", "quantization"),
    Private(
        "EngineArgs",
        "vllm.engine.arg_utils",
        "num_gpu_blocks_override kv_cache_memory_bytes gpu_memory_utilization worker_extension_cls "
        "async_scheduling disable_hybrid_kv_cache_manager enable_lora max_loras max_lora_rank "
        "create_engine_config",
    ),
    Private("VllmConfig", "vllm.config", "use_v2_model_runner"),
    Private("CacheConfig", "vllm.config", "kv_cache_layout", since=(0, 29)),
    Private("unify_hybrid_kv_cache_specs", "vllm.v1.core.kv_cache_utils", until=(0, 26)),
    Private("get_layers_from_vllm_config", "vllm.config"),
    Private("Attention", "vllm.model_executor.layers.attention"),
    Private(
        "NewRequestData",
        _OUTPUT,
        "req_id prompt_token_ids mm_features sampling_params pooling_params block_ids num_computed_tokens "
        "lora_request",
    ),
    Private("NewRequestData", _OUTPUT, "prefill_token_ids", runner="v2"),
    Private(
        "CachedRequestData",
        _OUTPUT,
        "req_ids resumed_req_ids new_token_ids all_token_ids new_block_ids num_computed_tokens "
        "num_output_tokens",
    ),
    Private(
        "SchedulerOutput",
        _OUTPUT,
        "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens total_num_scheduled_tokens "
        "scheduled_spec_decode_tokens scheduled_encoder_inputs finished_req_ids free_encoder_mm_hashes",
    ),
    Private("SchedulerOutput", _OUTPUT, "num_common_prefix_blocks", until=(0, 31)),
    Private("runner", "", "device sampler kv_caches execute_model_state kv_cache_config"),
    Private("SamplerOutput", "vllm.v1.outputs", "sampled_token_ids logprobs_tensors", runner="v1"),
    Private("runner", "", "input_batch", runner="v1"),
    Private("HAS_TRITON", "vllm.triton_utils", runner="v2"),
    Private(
        "InputBatch",
        f"{_V2}.input_batch",
        "req_ids num_reqs idx_mapping seq_lens logits_indices",
        runner="v2",
    ),
    Private("ExecuteModelState", f"{_V2}.model_runner", "input_batch hidden_states", runner="v2"),
    Private(
        "SamplerOutput",
        f"{_V2}.sample.output",
        "sampled_token_ids logprobs_tensors num_nans num_sampled num_rejected",
        runner="v2",
    ),
    Private("runner", "", "req_states", runner="v2"),
    Private("runner", "", "batch_sharder", since=(0, 29), runner="v2"),
    Private("req_states", "", "prefill_len", runner="v2"),
)


@cache
def installed() -> str:
    """Return vLLM's version."""
    return str(import_module("vllm").__version__)


@cache
def part(name: str, runner: str = "") -> Any:
    """Return a name of `TABLE` from where this vLLM has it."""
    row = next(row for row in _rows(runner) if row.name == name and row.module)
    found = getattr(_module(row.module), name, None)
    require(found is not None, f"no {row.module}.{name}")
    return found


@cache
def has(name: str, member: str, runner: str = "") -> bool:
    """Return whether this version has a member that other versions lack, by `TABLE`."""
    return any(row.name == name and member in row.members.split() for row in _rows(runner))


def check_version() -> None:
    """Raise ConfigError for a version that is too old; warn about one that is newer than those known."""
    require(number() >= OLDEST, "it is too old")
    if number() > NEWEST:
        _log.warning(
            f"vLLM {installed()} is tried: it is newer than {_known()}, whose private names Kvasir knows"
        )


def check_names(runner: str = "") -> None:
    """Raise ConfigError for the first name that this version lacks."""
    for row in _rows(runner):
        if row.module:
            check_members(part(row.name, row.runner), row.name, row.members.split())


def check_object(thing: Any, name: str, runner: str) -> None:
    """Raise ConfigError if an object of `TABLE` lacks an attribute."""
    for row in _rows(runner):
        if row.name == name and not row.module:
            check_members(thing, name, row.members.split())


def adapt() -> None:
    """Let layers with and without windows share one table of blocks in 0.26, which refuses that where it has
    chosen smaller blocks for the former. Later versions give all the same."""
    for row in _rows(""):
        if row.name == "unify_hybrid_kv_cache_specs":
            setattr(_module(row.module), row.name, partial(_unified, part(row.name)))


def _unified(plain: Callable[[dict[str, Any]], None], specs: dict[str, Any]) -> None:
    """Unify the KV of all layers, by name."""
    block_tokens = max((spec.block_size for spec in specs.values()), default=0)
    for name, spec in specs.items():
        specs[name] = replace(spec, block_size=block_tokens)
    plain(specs)


def check_members(thing: Any, name: str, members: Iterable[str]) -> None:
    """Raise ConfigError for the first member that a thing lacks."""
    declared = getattr(thing, "__dataclass_fields__", None) or getattr(thing, "__annotations__", {})
    for member in members:
        require(member in declared or hasattr(thing, member), f"no {name}.{member}")


def require(condition: bool, what: str, found: Any = None) -> None:
    """Raise ConfigError unless a condition about vLLM holds."""
    if not condition:
        seen = "" if found is None else f" (found: {found})"
        raise ConfigError(
            f"vLLM {installed()} is not as Kvasir knows it: {what}{seen}; Kvasir knows {_known()}: "
            "run `make setup-vllm`, or set engine native",
            param="engine",
        )


def number() -> Version:
    """Return vLLM's version without its last parts; later than all others for a build without a number."""
    found = re.match(r"(\d+)\.(\d+)", installed())
    return _LATER if found is None else (int(found[1]), int(found[2]))


def _rows(runner: str) -> list[Private]:
    """Return the rows of this version for a model runner."""
    return [row for row in TABLE if row.since <= number() <= row.until and row.runner in ("", runner)]


def _module(path: str) -> Any:
    try:
        return import_module(path)
    except ModuleNotFoundError:
        return None


def _known() -> str:
    return " to ".join(f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))
