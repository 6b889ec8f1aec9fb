"""Settings of an engine that is simulated."""

from pydantic import BaseModel, ConfigDict, Field


class SimulatedConfig(BaseModel):
    """Section `worker.simulated`: what counts with `worker.engine: simulated`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cost: str = Field(default="opt-13b-a100", description="cost model of a step, by name")
    speed: float = Field(default=1.0, gt=0, description="seconds of the cost model that pass in one second")
