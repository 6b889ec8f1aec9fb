"""Settings of one worker."""

from importlib.util import find_spec
from typing import Any, Literal

from pydantic import Field, SecretStr, model_validator

from services.worker.core.costs import find_cost
from services.worker.core.settings import (
    VLLM_BLOCK_TOKENS,
    BulkConfig,
    HostMemoryConfig,
    LendingConfig,
    PieSettings,
    PrefixCacheConfig,
    SimulatedConfig,
    TransferConfig,
    VllmConfig,
)
from services.worker.cores import check_cores
from services.worker.engine.adapters import largest_rank
from services.worker.kv.core.eviction import order_maker
from services.worker.kv_events import KvEventsConfig
from services.worker.prerequisites import check_cuda, check_disk
from shared.config import ModelServiceConfig
from shared.errors import ConfigError
from shared.gguf_files import is_gguf
from shared.model_files import check_model

_LACKING = {
    "simulated": "a simulated engine has no layers and no real KV",
    "vllm": "with engine vllm attention and KV are vLLM's, whole on their device",
}
"""Why an engine refuses some settings."""


class WorkerConfig(ModelServiceConfig):
    """Section `worker`. Durations in seconds."""

    engine: Literal["native", "vllm", "simulated"] = Field(
        default="native",
        description="who computes the model: the worker, vLLM, or nobody: answers are hashes",
    )
    vllm: VllmConfig = Field(default=VllmConfig(), description="settings of engine vllm")
    simulated: SimulatedConfig = Field(default=SimulatedConfig(), description="settings of engine simulated")
    count: int = Field(
        default=1,
        ge=1,
        le=256,
        description="workers in this process, simulated ones only: this instance and the next numbers",
    )
    passwords: dict[str, SecretStr] = Field(
        default={}, description="of the other workers in this process, by instance [bus.password]"
    )
    model: str = Field(
        default="models/tiny_chat",
        description="folder of a Hugging Face decoder, GGUF file, or hub id (ORG/NAME@REVISION)",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="float32", description="of weights and KV; auto: the checkpoint's"
    )
    weights: Literal["auto", "fp32", "bf16", "int8", "int4"] = Field(
        default="auto",
        description="bits of matrices on a CPU; auto: as a packed file has them, else dtype; fp32: widened",
    )
    device: str = Field(
        default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="torch device: cpu, cuda or cuda:N"
    )
    attention: Literal["auto", "native", "torch"] = Field(
        default="auto", description="C++ if a compiler built it, only C++, or plain torch"
    )
    threads: int = Field(default=1, ge=1, description="compute threads")
    lookup_tokens: int = Field(
        default=0,
        ge=0,
        le=15,
        description="most tokens of an answer guessed at once from the text so far, on a CPU; 0: none",
    )
    cores: tuple[int, ...] = Field(default=(), description="CPU cores to be bound to; empty: any")
    engine_cores: tuple[int, ...] = Field(
        default=(), description="CPU cores of the engine's thread and its compute threads instead"
    )
    block_tokens: int = Field(
        default=16, ge=1, description="tokens in one KV block; with vllm multiples of 32, and 32 unless set"
    )
    kv_memory_fraction: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="KV capacity: share of memory that weights leave; 0: 0.05 of a CPU's, 0.85 of a GPU's",
    )
    kv_blocks: int = Field(default=0, ge=0, description="KV capacity in blocks instead")
    kv_bytes: int = Field(default=0, ge=0, description="KV capacity in bytes instead of both")
    kv_dtype: Literal["auto", "bfloat16", "int8"] = Field(
        default="auto", description="of KV; on a CPU, with dtype float32: bfloat16 half, int8 over a quarter"
    )
    host_memory: HostMemoryConfig = Field(
        default=HostMemoryConfig(), description="KV outside the device, by share"
    )
    prefix_cache: PrefixCacheConfig = Field(
        default=PrefixCacheConfig(), description="KV that outlives its sequence"
    )
    bulk: BulkConfig = Field(default=BulkConfig(), description="tensors from worker to worker")
    lending: LendingConfig = Field(default=LendingConfig(), description="KV lent to and borrowed from others")
    transfer: TransferConfig = Field(default=TransferConfig(), description="KV of sequences that move")
    kv_events: KvEventsConfig = Field(
        default=KvEventsConfig(), description="cache events for readers outside"
    )
    states_every: int = Field(
        default=0, ge=0, description="tokens of an answer per hidden state for the predictor; 0: none"
    )
    host: str = Field(default="", description="workers of equal host are neighbours; empty: the host's name")
    heartbeat_s: float = Field(default=0.25, gt=0, description="between two heartbeats")
    gateway_timeout_s: float = Field(
        default=10.0, gt=0, description="sequences of a gateway that is silent for longer are ended"
    )
    pie: PieSettings = Field(default=PieSettings(), description="KV swapped to host memory")
    fault_drop_final_frames: bool = Field(
        default=False, description="for tests: lose every token frame in which a sequence ends"
    )

    def check(self) -> None:
        super().check()
        check_model(self.model)
        largest_rank(self.vllm.adapters)
        if self.lookup_tokens and (self.engine == "vllm" or self.device != "cpu"):
            text = "lookup_tokens is for the engines native and simulated on a CPU: leave it out"
            raise ConfigError(text, param="lookup_tokens")
        find_cost(self.simulated.cost)
        order_maker(self.prefix_cache.eviction)
        for name, cores in (("cores", self.cores), ("engine_cores", self.engine_cores)):
            check_cores(cores, name)
        if "ucx" in self.bulk.transports and find_spec("ucxx") is None:
            raise ConfigError(
                "the bulk transport ucx needs ucxx: run `make setup-ucx`", param="bulk.transports"
            )

    def check_start(self) -> None:
        if self.prefix_cache.enabled:
            check_disk(self.prefix_cache, self.instance)
        if self.engine == "native" and self.device != "cpu":
            check_cuda()

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_engine(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("engine") == "vllm":
            return {"block_tokens": VLLM_BLOCK_TOKENS, **given}
        if isinstance(given, dict) and given.get("engine") == "simulated":
            lending = given.get("lending", {})
            if isinstance(lending, dict):  # Borrowers read all heartbeats: too many in a large fleet.
                return {**given, "lending": {"borrow": False, **lending}}
        return given

    @model_validator(mode="after")
    def _nothing_that_the_engine_lacks(self) -> "WorkerConfig":
        wanted = {
            "pie.enabled": self.pie.enabled is True,
            "lending.borrow": self.lending.borrow is True and self.engine == "vllm",
            "kv_bytes": self.kv_bytes and self.engine == "simulated",
            "a GGUF file as model": is_gguf(self.model) and self.engine == "vllm",
            "weights": self.weights != "auto" and self.engine == "vllm",
            "attention": self.attention != "auto" and self.engine == "vllm",
            "kv_dtype": self.kv_dtype != "auto",
            "states_every": self.states_every,
        }
        without = [name for name, is_set in wanted.items() if is_set]
        if self.engine in _LACKING and without:
            raise ValueError(f"{_LACKING[self.engine]}: leave out {', '.join(without)}")
        if self.vllm.adapters and self.engine != "vllm":
            raise ValueError(
                f"engine {self.engine} has no LoRA adapters: leave out vllm.adapters, or set engine vllm"
            )
        if self.engine == "vllm" and self.device != "cpu" and self.vllm.tensor_parallel > 1:
            raise ValueError(
                "several ranks share their KV with Kvasir on a CPU only: set vllm.tensor_parallel 1, and "
                "start a worker per device"
            )
        if self.engine == "vllm" and self.device == "cpu" and self.block_tokens % VLLM_BLOCK_TOKENS:
            raise ValueError(
                f"vLLM's kernels for CPUs want blocks of a multiple of {VLLM_BLOCK_TOKENS} tokens: set "
                f"block_tokens {VLLM_BLOCK_TOKENS}, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _each_part_has_host_memory(self) -> "WorkerConfig":
        memory, cache = self.host_memory, self.prefix_cache
        below = "disk_mb" if cache.disk_mb else "peer_mb" if cache.peer_mb or cache.peer_blocks else ""
        if below and not ((memory.mb or memory.blocks) and memory.cached_share):
            raise ValueError(
                f"prefix_cache.{below} needs host_memory.cache_share: blocks go down one tier at a time"
            )
        if self.pie.enabled is True and not memory.pie_share:
            raise ValueError("pie.enabled needs host memory: lower host_memory.cache_share or lent_share")
        return self

    def cache_blocks(self, block_bytes: int) -> int:
        """Return the number of host blocks of the prefix cache; 0: it has none, or is off."""
        memory = self.host_memory
        return memory.blocks_of(memory.cached_share, block_bytes) if self.prefix_cache.enabled else 0

    def lent_blocks(self, block_bytes: int) -> int:
        """Return the number of host blocks for other workers. Raises ConfigError for memory below one."""
        memory = self.host_memory
        blocks = memory.blocks_of(memory.lent_share, block_bytes)
        if not blocks and memory.lent_share and (memory.mb or memory.blocks):
            raise ConfigError(
                f"host_memory.lent_share holds no block: one takes {block_bytes} bytes",
                param="host_memory.lent_share",
            )
        return blocks

    @model_validator(mode="after")
    def _several_only_without_a_model(self) -> "WorkerConfig":
        if self.count > 1:
            if self.engine != "simulated":
                raise ValueError(
                    'count: an engine that computes has a process of its own; set engine "simulated"'
                )
            self.crew()
        return self

    def crew(self) -> list["WorkerConfig"]:
        """Return the settings of each worker in this process. Raises ValueError if there are several and
        `instance` does not end in a number."""
        if self.count == 1:
            return [self]
        stem, dash, number = self.instance.rpartition("-")
        if not (dash and number.isdecimal()):
            raise ValueError(f"count: {self.instance!r} does not end in a number to count from")
        return [self._mate(f"{stem}-{int(number) + place}") for place in range(self.count)]

    def _mate(self, name: str) -> "WorkerConfig":
        password = self.passwords.get(name, self.bus.password)
        user = None if self.bus.user is None else name
        bus = self.bus.model_copy(update={"user": user, "password": password})
        return self.model_copy(update={"instance": name, "bus": bus, "count": 1, "passwords": {}})
