"""vLLM 0.32 with either of its model runners: a `ModelRunner` in this process, or one on several ranks.

`EngineCore` makes executor, KV tensors and warm-up in their order; its scheduler is made, too, and never
asked. This module, `rank.py` and `steps.py` with its V1 and V2 have all that is private to vLLM.
"""

import os
import random
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from services.worker.engine.settings import VllmConfig
from services.worker.engine.vllm.rank import open_steps
from services.worker.engine.vllm.requests import NULL_BLOCKS, ContinuedRequest, NewRequest
from services.worker.engine.vllm.seam import Draw, require
from services.worker.engine.vllm.steps import KvPart, Steps, check_fields
from services.worker.engine.vllm.steps_v2 import check_v2
from shared.errors import ConfigError

VERSION = "0.32."
"""What the version begins with."""
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a single model runner lives in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
_MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_PASSED_BYTES = 1 << 20
"""With a number of blocks vLLM allocates those, whatever it is told of memory; this passes its checks."""
_RANK = "services.worker.engine.vllm.rank.KvasirRank"
_SHARED = Path("/dev/shm")


class VllmRunner:
    """A `ModelRunner`."""

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
        """With `kv_blocks` 0 as many blocks as `kv_bytes` hold; with neither, on a GPU, as many as
        `memory_fraction` of its memory has room for beside the model.

        Raises ConfigError where this vLLM is another, and for a model that it cannot have in one table of
        blocks.
        """
        os.environ.update(_ENVIRONMENT)
        if settings.model_runner == "auto":
            os.environ.pop(_MODEL_RUNNER, None)
        else:
            os.environ[_MODEL_RUNNER] = "1" if settings.model_runner == "v2" else "0"
        if ":" in device:
            os.environ["CUDA_VISIBLE_DEVICES"] = device.partition(":")[2]
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor

        self.version: str = vllm.__version__
        require(self.version.startswith(VERSION), f"written for {VERSION}x", self.version)
        check_fields()
        ranks = settings.tensor_parallel
        from vllm.platforms import current_platform

        check_device(current_platform.device_type, device, ranks)
        arguments = EngineArgs(
            model=model,
            revision=revision,
            dtype=dtype,
            block_size=block_tokens,
            num_gpu_blocks_override=kv_blocks + NULL_BLOCKS if kv_blocks else None,
            **_memory(kv_blocks, kv_bytes // ranks, memory_fraction),
            max_model_len=-1,  # as long as there is KV for
            max_num_seqs=settings.max_rows,
            max_num_batched_tokens=settings.max_step_tokens,
            tensor_parallel_size=ranks,
            worker_extension_cls=_RANK if ranks > 1 else "",
            enable_prefix_caching=False,
            async_scheduling=False,  # else a step's tokens come a step later
            disable_hybrid_kv_cache_manager=True,  # layers with windows share the others' table
            enforce_eager=settings.eager,
            disable_log_stats=True,
            use_tqdm_on_load=False,
        )
        try:
            self._config = arguments.create_engine_config()
            if self._config.use_v2_model_runner:
                check_v2()
            self._core = EngineCore(self._config, Executor.get_class(self._config), log_stats=False)
        except (ValueError, NotImplementedError, OSError) as error:
            raise ConfigError(f"vLLM cannot serve {model}: {_first_line(error)}", param="model") from error
        random.seed()  # vLLM has given every worker the same
        self._executor: Any = self._core.model_executor
        self._steps: Steps | None = None
        if ranks == 1:
            runner = self._executor.driver_worker.worker.model_runner
            execute, sample = self._executor.execute_model, self._executor.sample_tokens
            self._steps = open_steps(runner, self._config, execute, sample)
            self.layout = self._steps.layout
            self.kv: Sequence[torch.Tensor] = self._steps.kv
        else:
            self.layout = " and ".join(self._executor.collective_rpc("kvasir_open"))
            self.kv = self._shared()
        self._check(kv_blocks)

    def _check(self, kv_blocks: int) -> None:
        shapes = {tuple(each.shape) for each in self.kv}
        blocks = self._config.cache_config.num_gpu_blocks
        require(bool(shapes), "KV is a list of tensors")
        require(not kv_blocks or blocks == kv_blocks + NULL_BLOCKS, f"{kv_blocks} blocks and block 0", blocks)
        require(all(shape[0] == blocks for shape in shapes), "KV begins with the blocks", shapes)

    @property
    def kind(self) -> str:
        """`v1` or `v2`, of vLLM's model runners."""
        return "v2" if self._config.use_v2_model_runner else "v1"

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

    def run(
        self,
        new: Sequence[NewRequest],
        continued: Sequence[ContinuedRequest],
        counts: Mapping[str, int],
        finished: set[str],
        draw: Draw,
    ) -> None:
        if self._steps is not None:
            self._steps.run(new, continued, counts, finished, draw)
            return
        step = (new, continued, counts, finished, draw)  # the same on every rank, so all draw the same
        draw.drawn = self._executor.collective_rpc("kvasir_step", args=step, unique_reply_rank=0)

    def close(self) -> None:
        self._core.shutdown()

    def _shared(self) -> list[torch.Tensor]:
        """The KV of all ranks, mapped into this process, too."""
        folder = Path(tempfile.mkdtemp(prefix="kvasir-", dir=_SHARED))
        try:
            parts: list[list[KvPart]] = self._executor.collective_rpc("kvasir_share", args=(str(folder),))
            return [part.mapped() for of_rank in parts for part in of_rank]
        finally:
            shutil.rmtree(folder)  # what is mapped stays until nobody has it


def check_device(built: str, device: str, ranks: int) -> None:
    """`built` is what this vLLM is built for. Raises ConfigError."""
    if not device.startswith(built):
        raise ConfigError(f"this vLLM is built for {built}: set worker.device {built}", param="device")
    if ranks > 1 and built != "cpu":
        raise ConfigError(
            "several ranks share their KV with Kvasir on a CPU only: set vllm.tensor_parallel 1",
            param="vllm.tensor_parallel",
        )


def _memory(kv_blocks: int, kv_bytes: int, fraction: float) -> dict[str, Any]:
    """How vLLM is told what KV may take."""
    if kv_blocks or kv_bytes:
        return {"kv_cache_memory_bytes": kv_bytes or _PASSED_BYTES}
    return {"gpu_memory_utilization": fraction}


def _first_line(error: Exception) -> str:
    """Of pydantic's errors the one that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next(
        (line for line in lines if line.startswith("Value error, ")), lines[0] if lines else repr(error)
    )
