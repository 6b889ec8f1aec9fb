"""Settings of engines other than the native one."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class SimulatedConfig(BaseModel):
    """Section `worker.simulated`, used with `worker.engine: simulated`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cost: str = Field(default="opt-13b-a100", description="cost model of a step, by name")
    speed: float = Field(default=1.0, gt=0, description="seconds of the cost model that pass in one second")


VLLM_BLOCK_TOKENS = 32
"""Block sizes of vLLM's CPU kernels are multiples of this."""


class VllmConfig(BaseModel):
    """Section `worker.vllm`, used with `worker.engine: vllm`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    eager: bool = Field(
        default=True, description="compute as the model is written; off: compiled, faster, a minute at first"
    )
    tensor_parallel: int = Field(
        default=1, ge=1, description="processes that each compute a part of every layer; on a CPU"
    )
    model_runner: Literal["auto", "v1", "v2"] = Field(
        default="auto", description="of vLLM's two: the one that it chooses itself, or this one"
    )
    max_rows: int = Field(default=256, ge=1, description="sequences that vLLM's buffers hold in one step")
    max_step_tokens: int = Field(
        default=2048, ge=32, description="tokens that they hold; longer steps are computed in parts"
    )
