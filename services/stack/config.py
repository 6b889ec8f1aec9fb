"""Settings of the stack."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from shared.config import ServiceConfig

SOFT_STATE_SERVICES = ("scheduler", "predictor", "placement", "ledger")


class StackConfig(ServiceConfig):
    """Settings of the section `stack`."""

    @property
    def instances(self) -> tuple[str, ...]:
        """All instance names, replaced services (`without`) included. Each is a NATS user."""
        workers = (f"worker-{number}" for number in range(self.workers))
        gateways = (f"gateway-{number}" for number in range(self.gateways))
        return (*gateways, *(f"{service}-0" for service in SOFT_STATE_SERVICES), *workers)

    port: int = Field(default=8080, ge=0, le=65535, description="of the HTTP gateway; 0 takes a free one")
    gateways: int = Field(
        default=1,
        ge=1,
        le=16,
        description="how many gateways; they share the port, and another one goes on for one that dies",
    )
    operator_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="of the first gateway's listener for the operator (/health, /ready, /metrics); 0 takes a "
        "free one, which `status` shows; further gateways take free ones",
    )
    nats_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="of nats-server; unset: 4222, or a free one when that is taken",
    )
    nats_max_payload_bytes: int = Field(
        default=8 * 1024 * 1024,
        ge=64 * 1024,
        le=64 * 1024 * 1024,
        description="longest message nats-server takes; bus.max_payload_bytes is the services' own limit",
    )
    nats_max_connections: int = Field(default=1024, ge=16, description="connections that nats-server takes")
    nats_max_memory_store_bytes: int = Field(
        default=16 * 1024 * 1024, gt=0, description="JetStream's memory, of which the stack needs none"
    )
    nats_max_file_store_bytes: int = Field(
        default=64 * 1024 * 1024, ge=1024 * 1024, description="JetStream's files, where the lease lives"
    )
    tls: bool = Field(
        default=False,
        description="encrypt the bus; with a certificate made at every start unless nats_tls_cert names one",
    )
    nats_tls_cert: Path | None = Field(default=None, description="PEM file: nats-server's certificate")
    nats_tls_key: Path | None = Field(default=None, description="PEM file: the key of that certificate")
    nats_tls_ca: Path | None = Field(
        default=None, description="PEM file: who signed it; unset: an authority that the system trusts"
    )
    workers: int = Field(default=2, ge=1, le=256, description="how many worker processes")
    workers_per_process: int = Field(
        default=0,
        ge=0,
        le=256,
        description="simulated workers that share a process; 0: one each up to 8, then a quarter of all",
    )
    engine: Literal["native", "vllm", "simulated"] | None = Field(
        default=None,
        description="vllm: vLLM computes the model; simulated: workers take the time of a model and compute "
        "nothing, for experiments; unset: what worker.engine says",
    )
    vllm_python: Path = Field(
        default=Path(".venv-vllm/bin/python"),
        description="the Python that workers with engine vllm run in; a path is the repository's",
    )
    model: str | None = Field(
        default=None,
        description="folder, hub id or name of a model that was pulled, or NAME= and one of these; unset: "
        "what the services default to; repeatable: workers take the models in turn",
    )
    more_models: tuple[str, ...] = Field(
        default=(),
        description="further models, each as `model` is written; workers take all of them in turn",
    )
    served_name: str | None = Field(
        default=None, description="what clients call the model; unset: the last part of its folder or id"
    )
    without: tuple[Literal["scheduler", "predictor", "placement", "ledger"], ...] = Field(
        default=(), description="services not to start: one of your own takes that place on the bus"
    )
    preload: bool = Field(
        default=True, description="services are forked from one process that has imported what they need"
    )
    start_timeout_s: float = Field(
        default=180.0, gt=0, description="not ready after this, the start has failed"
    )
    stop_grace_s: float = Field(default=8.0, gt=0, description="between SIGTERM and SIGKILL")
