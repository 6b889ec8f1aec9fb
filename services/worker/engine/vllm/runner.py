"""`ModelRunner` for vLLM with either of its runners, in this process or on several ranks.

`EngineCore` creates the executor and KV tensors and warms up; its scheduler is not used. Only this module
and `steps*.py` use private parts of vLLM, all of which `versions.py` lists."""

import os
import random
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from services.worker.core.settings import VllmConfig
from services.worker.engine.adapters import folder_of, largest_rank
from services.worker.engine.sampler import Chosen
from services.worker.engine.vllm.draw import StepDraw
from services.worker.engine.vllm.requests import NULL_BLOCKS, StepRequests
from services.worker.engine.vllm.steps import KvPart, Steps, StepsV1
from services.worker.engine.vllm.steps_v2 import StepsV2, check_v2
from services.worker.engine.vllm.versions import adapt, check_names, check_version, installed, part, require
from shared.errors import ConfigError

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a single model runner lives in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_PASSED_BYTES = 1 << 20
"""Memory size that passes vLLM's checks; with a number of blocks vLLM ignores it."""
_RANK = "services.worker.engine.vllm.runner.KvasirRank"
_SHARED = Path("/dev/shm")


class VllmRunner:
    """Implements `ModelRunner`."""

    def __init__(
        self,
        model: str,
        *,
        revision: str | None,
        device: str,
        dtype: str,
        block_tokens: int,
        kv_blocks: int,
        kv_bytes: int,
        memory_fraction: float,
        settings: VllmConfig,
    ) -> None:
        """`kv_blocks` 0: as many as `kv_bytes` hold; both 0: as `memory_fraction` of the GPU allows.

        Raises ConfigError for a vLLM that lacks a name, a model that needs several block tables, or an
        adapter that vLLM cannot load."""
        os.environ.update(_ENVIRONMENT)
        if settings.model_runner == "auto":
            os.environ.pop(_MODEL_RUNNER, None)
        else:
            os.environ[_MODEL_RUNNER] = "1" if settings.model_runner == "v2" else "0"
        check_version()
        check_names()
        adapt()
        self.version = installed()
        ranks = settings.tensor_parallel
        check_device(part("current_platform").device_type, device, ranks)
        arguments = part("EngineArgs")(
            model=model,
            revision=revision,
            dtype=dtype,
            block_size=block_tokens,
            num_gpu_blocks_override=kv_blocks + NULL_BLOCKS if kv_blocks else None,
            **_memory(kv_blocks, kv_bytes // ranks, memory_fraction),
            max_model_len=-1,  # as long as the KV allows
            max_num_seqs=settings.max_rows,
            max_num_batched_tokens=settings.max_step_tokens,
            tensor_parallel_size=ranks,
            worker_extension_cls=_RANK if ranks > 1 else "",
            enable_prefix_caching=False,
            async_scheduling=device != "cpu",  # sampled tokens go to the next step on the device
            disable_hybrid_kv_cache_manager=True,  # one block table for layers with and without windows
            enforce_eager=settings.eager,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            **_lora(settings.adapters, device),
        )
        try:
            self._config: Any = arguments.create_engine_config()
            check_quantised(self._config.model_config)
            self.kind = "v2" if self._config.use_v2_model_runner else "v1"
            """vLLM's model runner."""
            if self.kind == "v2":
                check_v2()
            check_names(self.kind)
            executor = part("Executor").get_class(self._config)
            self._core: Any = part("EngineCore")(self._config, executor, log_stats=False)
        except (ValueError, RuntimeError, OSError) as error:  # an operation may be missing on this device
            raise ConfigError(f"vLLM cannot serve {model}: {_first_line(error)}", param="model") from error
        random.seed()  # vLLM sets the same seed in every worker
        self._executor: Any = self._core.model_executor
        adapters = self._loaded(settings.adapters)
        self._steps: Steps | None = None
        self._step: StepRequests | None = None
        self.overlaps = bool(self._config.scheduler_config.async_scheduling)
        if ranks == 1:
            self._steps = open_steps(self._executor.driver_worker.worker, adapters)
            self.layout = self._steps.layout
            self.kv: Sequence[torch.Tensor] = self._steps.kv
        else:
            self.layout = " and ".join(self._executor.collective_rpc("kvasir_open", args=(adapters,)))
            self.kv = self._shared()
        model_config: Any = self._config.model_config
        self.vocabulary = int(model_config.get_vocab_size())
        self.max_positions = int(model_config.max_model_len) - 1  # vLLM asserts this in _bookkeeping_sync
        self.dtype: torch.dtype = model_config.dtype
        shapes = {tuple(each.shape) for each in self.kv}
        blocks = self._config.cache_config.num_gpu_blocks
        require(bool(shapes), "KV is a list of tensors")
        require(not kv_blocks or blocks == kv_blocks + NULL_BLOCKS, f"{kv_blocks} blocks and block 0", blocks)
        require(all(shape[0] == blocks for shape in shapes), "KV begins with the blocks", shapes)

    def compute(self, step: StepRequests) -> None:
        self._step = step
        if self._steps is not None:
            self._steps.compute(step)

    def sample(self, draw: StepDraw) -> None:
        if self._steps is not None:
            self._steps.sample(draw)
        else:  # the same on every rank
            found = self._executor.collective_rpc("kvasir_step", args=(self._step, draw), unique_reply_rank=0)
            draw.chosen, draw.hidden = found

    def close(self) -> None:
        self._core.shutdown()

    def _loaded(self, adapters: Mapping[str, str]) -> dict[str, Any]:
        """Load the adapters and return vLLM's requests for them. Raises ConfigError."""
        found: dict[str, Any] = {}
        for number, (name, path) in enumerate(adapters.items(), 1):
            folder = str(folder_of(path).resolve())
            found[name] = part("LoRARequest")(lora_name=name, lora_int_id=number, lora_path=folder)
            try:
                self._core.add_lora(found[name])
            except Exception as error:  # of many kinds, also a rank's, by way of the executor
                raise ConfigError(
                    f"vLLM cannot load adapter {name!r} from {path}: {_first_line(error)}; was it trained "
                    "for this model? Leave it out, or name another folder",
                    param="vllm.adapters",
                ) from error
        return found

    def _shared(self) -> list[torch.Tensor]:
        """Return the KV of all ranks, mapped into this process."""
        folder = Path(tempfile.mkdtemp(prefix="kvasir-", dir=_SHARED))
        try:
            parts: list[list[KvPart]] = self._executor.collective_rpc("kvasir_share", args=(str(folder),))
            return [part.mapped() for of_rank in parts for part in of_rank]
        finally:
            shutil.rmtree(folder)  # mapped memory stays until it is unmapped


def check_device(built: str, device: str, ranks: int) -> None:
    """Raise ConfigError if vLLM, built for device type `built`, does not support device and ranks."""
    if not device.startswith(built):
        raise ConfigError(f"this vLLM is built for {built}: set worker.device {built}", param="device")
    if ranks > 1 and built != "cpu":
        raise ConfigError(
            "several ranks share their KV with Kvasir on a CPU only: set vllm.tensor_parallel 1",
            param="vllm.tensor_parallel",
        )


def check_quantised(model: Any) -> None:
    """Raise ConfigError for a quantised checkpoint in fp32, for which some kernels of vLLM fail at a step."""
    if model.quantization is not None and model.dtype is torch.float32:
        raise ConfigError(
            f"vLLM computes weights in {model.quantization} with 16 bits: set worker.dtype bfloat16",
            param="dtype",
        )


def _memory(kv_blocks: int, kv_bytes: int, fraction: float) -> dict[str, Any]:
    """Return vLLM's arguments for the size of the KV memory."""
    if kv_blocks or kv_bytes:
        return {"kv_cache_memory_bytes": kv_bytes or _PASSED_BYTES}
    return {"gpu_memory_utilization": fraction}


def _lora(adapters: Mapping[str, str], device: str) -> dict[str, Any]:
    """Return vLLM's arguments for adapters, all of which stay loaded."""
    if not adapters:
        return {}
    # vLLM's kernels for CPUs compute rows without an adapter with the last place, which stays empty.
    places = len(adapters) + (device == "cpu")
    return {"enable_lora": True, "max_loras": places, "max_lora_rank": largest_rank(adapters)}


def _first_line(error: Exception) -> str:
    """Return the line of an error, also of pydantic's, that states the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next(
        (line for line in lines if line.startswith("Value error, ")), lines[0] if lines else repr(error)
    )


def open_steps(worker: Any, adapters: Mapping[str, Any]) -> Steps:
    """Return the `Steps` for the model runner of vLLM's worker. Raises ConfigError as `Steps` does."""
    return (StepsV2 if worker.vllm_config.use_v2_model_runner else StepsV1)(worker, adapters)


class KvasirRank:
    """Extension of vLLM's worker class: methods that its executor calls by name, on each rank of a
    tensor-parallel model. Every rank has all logits and samples the same tokens from them."""

    kvasir_steps: Steps

    def kvasir_open(self, adapters: Mapping[str, Any]) -> str:
        """Prepare the rank and return its KV layout. Call this first."""
        self.kvasir_steps = open_steps(self, adapters)
        return self.kvasir_steps.layout

    def kvasir_share(self, folder: str) -> list[KvPart]:
        """See `Steps.share`. Also unlinks vLLM's shared memory, which would outlive a killed rank."""
        worker: Any = self
        for left in _SHARED.glob(f"{os.environ['VLLM_DIST_IDENT']}*_{worker.rank}"):
            left.unlink(missing_ok=True)
        return self.kvasir_steps.share(folder, worker.rank)

    def kvasir_step(self, step: StepRequests, draw: StepDraw) -> tuple[Chosen | None, torch.Tensor | None]:
        """Run one step and return what `draw` then has."""
        self.kvasir_steps.compute(step)
        self.kvasir_steps.sample(draw)
        return draw.chosen, draw.hidden
